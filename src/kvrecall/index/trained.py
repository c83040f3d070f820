"""Codes of single tokens that depend on something learnt from the prompt's keys: a codebook, a mean."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from kvrecall.cache.prefetch import zone_rows
from kvrecall.core.archive import Archive
from kvrecall.index.base import IndexConfig, LayerShape, RowSource
from kvrecall.index.table import SequenceRows
from kvrecall.index.tokens import TokenIndex
from kvrecall.select.queries import ObservedQueries


class TrainedIndex(TokenIndex):
    """Learns one tensor per sequence from all keys of the zone at the end of a prompt; later keys are coded with it.

    The tensor is never written to, only replaced.
    """

    def __init__(self, shape: LayerShape, config: IndexConfig, width: int, dtype: torch.dtype) -> None:
        super().__init__(shape, config)
        self._device = shape.device
        self._codes = SequenceRows(shape.sequences, shape.kv_heads, width, dtype, shape.device)
        self._trained: list[Tensor | None] = [None] * shape.sequences
        self._waiting = [0] * shape.sequences  # tokens that wait for the first training
        self._sources: Sequence[RowSource] = ()

    @abstractmethod
    def train(self, keys: Tensor) -> Tensor:
        """The learnt tensor for keys `[H_kv, n, D]`, n > 0."""

    @abstractmethod
    def encode(self, keys: Tensor, trained: Tensor) -> Tensor:
        """Codes `[H_kv, n, width]` of keys `[H_kv, n, D]`."""

    @property
    def lengths(self) -> list[int]:  # type: ignore[override]
        return [coded + waiting for coded, waiting in zip(self._codes.lengths, self._waiting, strict=True)]

    @property
    def nbytes(self) -> int:
        return self._codes.nbytes + sum(held.nbytes for held in self._trained if held is not None)

    def bind(self, sources: Sequence[RowSource]) -> None:
        self._sources = sources

    def append(self, sequence: int, keys: Tensor) -> None:
        trained = self._trained[sequence]
        if trained is None:
            self._waiting[sequence] += keys.shape[1]
        else:
            self._codes.append(sequence, self.encode(keys, trained))

    def end_of_prompt(self, sequence: int, observed: ObservedQueries | None, offset: int) -> None:
        self._waiting[sequence] = self.lengths[sequence]
        self._codes.truncate(sequence, 0)
        self._trained[sequence] = None
        self.trained(sequence)

    def truncate(self, sequence: int, tokens: int) -> None:
        self._codes.truncate(sequence, tokens)
        self._waiting[sequence] = min(self._waiting[sequence], tokens - self._codes.lengths[sequence])

    @property
    @abstractmethod
    def trained_shape(self) -> tuple[int, ...]:
        """Shape of the learnt tensor of a sequence."""

    def archive(self, archive: Archive, tokens: list[int]) -> None:
        super().archive(archive, tokens)
        lengths = self.lengths
        for b, own in archive.each("sequence", len(tokens)):
            held = own.optional("trained", self._trained[b], self.trained_shape, torch.float32)
            self._trained[b] = held
            self._waiting[b] = own.integer("waiting", self._waiting[b], most=tokens[b])
        coded = [count - waiting for count, waiting in zip(tokens, self._waiting, strict=True)]
        if any(count and held is None for count, held in zip(coded, self._trained, strict=True)):
            archive.refuse("trained", "what the codes were made by", "none")
        assert not archive.saving or lengths == tokens
        self._codes.archive(archive, "codes", list(coded))

    def select(self, sequences: list[int]) -> Self:
        chosen = super().select(sequences)
        chosen._codes = self._codes.select(sequences)
        chosen._trained = [self._trained[b] for b in sequences]
        chosen._waiting = [self._waiting[b] for b in sequences]
        return chosen

    def prepare(self, sequences: list[int]) -> None:
        for b in sequences:
            self.trained(b)

    def codes(self, sequence: int) -> Tensor:
        """The codes of all tokens of a sequence; call `trained` first."""
        return self._codes.view(sequence)

    def trained(self, sequence: int) -> Tensor | None:
        """The learnt tensor of a sequence, computed if needed; None for a zone that has always been empty."""
        count = self._waiting[sequence]
        if self._trained[sequence] is None and count:
            keys = zone_rows(self._sources[sequence], 0, count)[:, :, 0].to(self._device)
            self._trained[sequence] = held = self.train(keys)
            self._waiting[sequence] = 0
            self._codes.append(sequence, self.encode(keys, held))
        return self._trained[sequence]

"""Speculative retrieval (FreeKV): what the previous step's query selects is used now, unless a KV head's query has turned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvrecall.core.archive import Archive
from kvrecall.core.errors import ParameterError
from kvrecall.parts import Part
from kvrecall.trigger import Trigger, mean_cosine


@dataclass(frozen=True)
class Speculative(Part):
    """Fires at every step; a KV head searches with the query of the step before unless its cosine with the present one,
    averaged over the group, is below `threshold` (FreeKV: 0.8 for long inputs, 0.9 for long outputs).

    The selection is FreeKV's, except that it may hold tokens that reached the retrieval zone since the step before. The time
    it hides by searching ahead is hidden in captured decoding only: elsewhere the search runs in the step that uses it.
    """

    role: ClassVar[str] = "trigger"
    name: ClassVar[str] = "speculative"
    marks_segments: ClassVar[bool] = False

    threshold: float = 0.8

    def __post_init__(self) -> None:
        if not isinstance(self.threshold, int | float) or not -1 <= self.threshold <= 1:
            raise ParameterError("threshold", "a cosine in [-1, 1]", self.threshold, "FreeKV uses 0.8 and 0.9.")

    def build(self, sequences: int, layer: int = 0) -> SpeculativeTrigger:
        return SpeculativeTrigger(self.threshold, sequences)


class SpeculativeTrigger(Trigger):
    """Remembers the queries of the last two steps per sequence."""

    of_sequence = ("last", "_before")

    def __init__(self, threshold: float, sequences: int) -> None:
        self._threshold = threshold
        self.last: list[Tensor | None] = [None] * sequences
        """The queries of each sequence's last step, `[H_q, D]`; None before the first."""
        self._before: list[Tensor | None] = [None] * sequences

    def fires(self, queries: Tensor, sequences: list[int]) -> list[bool]:
        for query, b in zip(queries, sequences, strict=True):
            self._before[b], self.last[b] = self.last[b], query.clone()
        return [True] * len(sequences)

    def asks(self, queries: Tensor, sequences: list[int], kv_heads: int) -> Tensor:
        chosen = []
        for query, b in zip(queries, sequences, strict=True):
            before = self._before[b]
            if before is not None:
                now, then = (x.unflatten(0, (kv_heads, -1)) for x in (query, before))
                turned = mean_cosine(now.float(), then.float()) < self._threshold  # [H_kv]
                query = torch.where(turned.view(-1, 1, 1), now, then).flatten(0, 1)
            chosen.append(query)
        return torch.stack(chosen)

    def forget(self, sequence: int) -> None:
        self.last[sequence] = self._before[sequence] = None

    def archive(self, archive: Archive, query: tuple[int, int]) -> None:
        dtypes = torch.bfloat16, torch.float16, torch.float32
        for b, part in archive.each("sequence", len(self.last)):
            self.last[b] = part.optional("last", self.last[b], query, dtypes)
            self._before[b] = part.optional("before", self._before[b], query, dtypes)

"""No summaries: every search finds nothing. For methods whose retrieval zone is a static set or is never attended."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvrecall.core.archive import Archive
from kvrecall.core.structs import Budget, Selection
from kvrecall.index.base import Index, IndexConfig, LayerShape


@dataclass(frozen=True)
class NothingConfig(IndexConfig):
    """Finds nothing, at no cost; `gqa` has no effect."""

    name: ClassVar[str] = "nothing"

    def build(self, shape: LayerShape) -> NothingIndex:
        return NothingIndex(shape)

    def nbytes(self, shape: LayerShape, tokens: int) -> int:
        return 0


class NothingIndex(Index):
    """Counts tokens."""

    def __init__(self, shape: LayerShape) -> None:
        self._kv_heads, self.lengths = shape.kv_heads, [0] * shape.sequences

    def append(self, sequence: int, keys: Tensor) -> None:
        self.lengths[sequence] += keys.shape[1]

    def exclude(self, sequence: int, ids: Tensor | None) -> None:
        """There is nothing to leave out."""

    def truncate(self, sequence: int, tokens: int) -> None:
        self.lengths[sequence] = min(tokens, self.lengths[sequence])

    def archive(self, archive: Archive, tokens: list[int]) -> None:
        self.lengths = list(tokens)

    def select(self, sequences: list[int]) -> NothingIndex:
        chosen = copy(self)
        chosen.lengths = [self.lengths[b] for b in sequences]
        return chosen

    def search(self, queries: Tensor, budget: Budget, sequences: list[int]) -> Selection:
        counts = torch.zeros(len(sequences), self._kv_heads, dtype=torch.int32, device=queries.device)
        return Selection(counts.new_empty(*counts.shape, 0), counts)

    @property
    def nbytes(self) -> int:
        return 0

"""Exact top-k by inner product: the ground truth that other indexes are measured against.

Its summary is a copy of the keys on the device, so only values save device memory. Beside it the index that searches nothing,
for methods whose retrieval zone is a static set or is never attended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvrecall.core.archive import Archive
from kvrecall.core.per_sequence import PerSequence
from kvrecall.core.structs import Budget, Selection
from kvrecall.index.base import Index, IndexConfig, LayerShape, nothing_found
from kvrecall.index.tokens import TokenConfig

_SCORED_TOKENS = 8192
"""Tokens scored at a time: bounds the float64 copy of the keys to H_kv * 8192 * D * 8 bytes."""


@dataclass(frozen=True)
class ExactConfig(TokenConfig):
    """Exact top-k; by default with the best single search per KV head, the mean softmax."""

    name: ClassVar[str] = "exact"

    def tables(self, shape: LayerShape) -> dict[str, tuple[int, torch.dtype]]:
        return {"keys": (shape.head_dim, shape.dtype)}

    def summaries(self, keys: Tensor) -> tuple[Tensor, ...]:
        return (keys,)

    def scores(self, queries: Tensor, summaries: Sequence[Tensor]) -> Tensor:
        return inner_products(queries, summaries[0])


def inner_products(queries: Tensor, keys: Tensor) -> Tensor:
    """Inner products fp32 `[…, H_kv, G', n]` of queries `[…, H_kv, G', D]` and keys `[…, H_kv, n, D]`.

    Summed in float64 and rounded, so that equal keys have equal scores at every place: matrix products sum rows at the edge of
    a tile in another order.
    """
    pieces = keys.split(_SCORED_TOKENS, dim=-2)
    return torch.cat([queries.double() @ piece.double().transpose(-1, -2) for piece in pieces], -1).float()


@dataclass(frozen=True)
class NothingConfig(IndexConfig):
    """Finds nothing, at no cost; `gqa` has no effect."""

    name: ClassVar[str] = "nothing"
    pages_refusal: ClassVar[str] = "it searches nothing, so it needs no pages of summaries"

    def build(self, shape: LayerShape) -> NothingIndex:
        return NothingIndex(shape)

    def nbytes(self, shape: LayerShape, tokens: int) -> int:
        return 0


class NothingIndex(PerSequence, Index):
    """Counts tokens."""

    of_sequence = ("lengths",)

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

    def search(self, queries: Tensor, budget: Budget, sequences: list[int]) -> Selection:
        return nothing_found(len(sequences), self._kv_heads, queries.device)

    @property
    def nbytes(self) -> int:
        return 0

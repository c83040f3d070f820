"""Exact top-k by inner product: the ground truth that other indexes are measured against.

Its "summary" is a copy of the keys on the compute device, so it saves no device memory for keys; values still live on the host.
"""

from __future__ import annotations

from copy import copy

import torch
from torch import Tensor

from kvrecall.index.base import Index, LayerShape, stack_selections
from kvrecall.index.table import TokenTable
from kvrecall.select.gqa import check_mode, reduce_scores, search_queries
from kvrecall.select.topk import top_k_positions, union_rows
from kvrecall.structs import Budget, Selection

_SCORED_TOKENS = 8192
"""Tokens scored at a time: bounds the float64 copy of the keys to H_kv * 8192 * D * 8 bytes."""


class ExactIndex(Index):
    """Scores every key. `gqa` as in `kvrecall.select.gqa`."""

    def __init__(self, shape: LayerShape, gqa: str = "mean_softmax") -> None:
        check_mode(gqa)
        self._gqa, self._kv_heads = gqa, shape.kv_heads
        self._keys = TokenTable(shape.sequences, shape.kv_heads, shape.head_dim, shape.dtype, shape.device)

    @property
    def lengths(self) -> list[int]:  # type: ignore[override]
        return self._keys.lengths

    @property
    def nbytes(self) -> int:
        return self._keys.nbytes

    @staticmethod
    def nbytes_per_token(head_dim: int, dtype: torch.dtype) -> float:
        """Device bytes per token and KV head."""
        return head_dim * dtype.itemsize

    def reserve(self, tokens: int) -> None:
        self._keys.reserve(tokens)

    def append(self, sequence: int, keys: Tensor) -> None:
        self._keys.append(sequence, keys)

    def truncate(self, sequence: int, tokens: int) -> None:
        self._keys.truncate(sequence, tokens)

    def select(self, sequences: list[int]) -> ExactIndex:
        chosen = copy(self)
        chosen._keys = self._keys.select(sequences)
        return chosen

    def search(self, queries: Tensor, budget: Budget, sequences: list[int]) -> Selection:
        grouped = search_queries(queries, self._kv_heads, self._gqa)
        found = []
        for query, sequence in zip(grouped, sequences, strict=True):
            scores = _scores(query, self._keys.view(sequence))
            reduced = reduce_scores(scores, self._gqa, budget.scaling)
            reduced = reduced if self._gqa == "per_head" else reduced.unsqueeze(-2)
            found.append(union_rows(top_k_positions(reduced, budget.top_k).to(torch.int32)))
        return stack_selections(found)


def _scores(queries: Tensor, keys: Tensor) -> Tensor:
    """Inner products fp32 `[H_kv, G', n]` of queries `[H_kv, G', D]` and keys `[H_kv, n, D]`.

    Summed in float64 and rounded, so that equal keys score the same wherever they lie: matrix products sum the rows at the
    edge of a tile in another order.
    """
    pieces = keys.split(_SCORED_TOKENS, dim=1)
    return torch.cat([queries.double() @ piece.double().transpose(-1, -2) for piece in pieces], -1).float()

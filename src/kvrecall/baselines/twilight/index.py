"""Twilight's pruning after any index: low-bit keys estimate the attention to each found token, and small ones are dropped."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from kvrecall.baselines.twilight.quantised import Quantised, code_bytes, quantise, restore
from kvrecall.baselines.twilight.top_p import prune
from kvrecall.core.errors import ParameterError
from kvrecall.core.structs import Budget, Selection
from kvrecall.index.base import Index, LayerShape, stack_selections
from kvrecall.index.table import TokenTable
from kvrecall.index.wrapper import IndexWrapper, Pruning
from kvrecall.select.gqa import search_queries


@dataclass(frozen=True)
class TopP(Pruning):
    """p: share of the estimated attention to the found tokens that is kept, in (0, 1]; 1 keeps everything. bits: of the key
    codes for the estimate, 2 to 8 (Twilight: 4; up to 4 take half a byte). `top_k` is the most that a step attends to.
    """

    name: ClassVar[str] = "top-p"

    p: float = 0.85
    bits: int = 4

    def __post_init__(self) -> None:
        if not isinstance(self.p, int | float) or not 0 < self.p <= 1:
            raise ParameterError("p", "a share in (0, 1]", self.p, "Twilight uses 0.85 for Llama 3.1.")
        if not isinstance(self.bits, int) or not 2 <= self.bits <= 8:
            raise ParameterError("bits", "an integer in 2 .. 8", self.bits, "Twilight uses 4.")

    def build(self, index: Index, shape: LayerShape, gqa: str) -> PrunedIndex:
        return PrunedIndex(index, shape, self, gqa)

    def nbytes(self, shape: LayerShape, tokens: int) -> int:
        return shape.kv_heads * tokens * (code_bytes(shape.head_dim, self.bits) + 8)


class PrunedIndex(IndexWrapper):
    """Searches in `base` and prunes each selection by `TopP`; gqa: how the heads of a group are combined."""

    def __init__(self, base: Index, shape: LayerShape, config: TopP, gqa: str) -> None:
        self._config, self._gqa, self._kv_heads = config, gqa, shape.kv_heads

        def table(width: int, dtype: torch.dtype) -> TokenTable:
            of = "low-bit keys", config.bits
            return TokenTable(of, shape.sequences, shape.kv_heads, width, dtype, shape.device)

        super().__init__(base, table(code_bytes(shape.head_dim, config.bits), torch.uint8), table(2, torch.float32))

    def append(self, sequence: int, keys: Tensor) -> None:
        self._keep(sequence, keys)
        super().append(sequence, keys)

    def append_generated(self, sequence: int, keys: Tensor) -> None:
        self._keep(sequence, keys)
        super().append_generated(sequence, keys)

    def reserve(self, tokens: int) -> None:
        for part in (self.base, *self.tables):
            part.reserve(tokens)

    def truncate(self, sequence: int, tokens: int) -> None:
        for part in (self.base, *self.tables):
            part.truncate(sequence, tokens)

    def finish(self, found: Selection, queries: Tensor, budget: Budget, sequences: list[int]) -> Selection:
        grouped = search_queries(queries, self._kv_heads, self._gqa).double()
        kept = []
        for ids, query, b in zip(found.ids.to(queries.device), grouped, sequences, strict=True):
            logits = torch.einsum("hgd,hkd->hgk", query, self._keys(b, ids)) * budget.scaling
            kept.append(prune(ids, logits, self._gqa, self._config.p))
        return replace(stack_selections(kept), estimated=found.estimated)

    def _keep(self, sequence: int, keys: Tensor) -> None:
        packed = quantise(keys, self._config.bits)
        for table, part in zip(self.tables, packed, strict=True):
            table.append(sequence, part)

    def _keys(self, sequence: int, ids: Tensor) -> Tensor:
        """Estimated keys fp64 `[H_kv, K, D]` of ids int32 `[H_kv, K]`; undefined for ids of -1."""
        at = ids.long().clamp_min(0)
        return restore(Quantised(*(table.take(sequence, at) for table in self.tables)), self._config.bits)

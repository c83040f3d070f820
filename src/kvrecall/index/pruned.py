"""Any index, followed by Twilight's pruning: low-bit keys estimate the attention to what was found, and the rest is dropped."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace

import torch
from torch import Tensor

from kvrecall.index.base import Index, LayerShape, RowSource, stack_selections
from kvrecall.index.quantised import Quantised, code_bytes, quantise, restore
from kvrecall.index.table import TokenTable
from kvrecall.select.gqa import search_queries
from kvrecall.select.queries import ObservedQueries
from kvrecall.select.top_p import TopP, prune
from kvrecall.structs import Budget, Selection


class PrunedIndex(Index):
    """Searches in `base` and keeps of each selection what `TopP` leaves, judged as `gqa` says."""

    def __init__(self, base: Index, shape: LayerShape, config: TopP, gqa: str) -> None:
        self.base, self._config, self._gqa, self._kv_heads = base, config, gqa, shape.kv_heads
        width = code_bytes(shape.head_dim, config.bits)
        self._codes = TokenTable(shape.sequences, shape.kv_heads, width, torch.uint8, shape.device)
        self._ranges = TokenTable(shape.sequences, shape.kv_heads, 2, torch.float32, shape.device)

    @property
    def lengths(self) -> list[int]:  # type: ignore[override]
        return self.base.lengths

    @property
    def nbytes(self) -> int:
        return self.base.nbytes + self._codes.nbytes + self._ranges.nbytes

    def append(self, sequence: int, keys: Tensor) -> None:
        self._keep(sequence, keys)
        self.base.append(sequence, keys)

    def append_generated(self, sequence: int, keys: Tensor) -> None:
        self._keep(sequence, keys)
        self.base.append_generated(sequence, keys)

    def bind(self, sources: Sequence[RowSource]) -> None:
        self.base.bind(sources)

    def end_of_prompt(self, sequence: int, observed: ObservedQueries | None, offset: int) -> None:
        self.base.end_of_prompt(sequence, observed, offset)

    def exclude(self, sequence: int, ids: Tensor | None) -> None:
        self.base.exclude(sequence, ids)

    @property
    def watches(self) -> bool:  # type: ignore[override]
        return self.base.watches

    def watch(
        self, sequence: int, observed: ObservedQueries, resident: list[tuple[Tensor, int]], offset: int, scaling: float
    ) -> None:
        self.base.watch(sequence, observed, resident, offset, scaling)

    def learn(self, sequences: list[int]) -> None:
        self.base.learn(sequences)

    def reserve(self, tokens: int) -> None:
        for part in (self.base, self._codes, self._ranges):
            part.reserve(tokens)

    def truncate(self, sequence: int, tokens: int) -> None:
        for part in (self.base, self._codes, self._ranges):
            part.truncate(sequence, tokens)

    def select(self, sequences: list[int]) -> PrunedIndex:
        chosen = copy(self)
        chosen.base = self.base.select(sequences)
        chosen._codes, chosen._ranges = self._codes.select(sequences), self._ranges.select(sequences)
        return chosen

    def candidates(self, queries: Tensor, budget: Budget, sequences: list[int]) -> list[Tensor] | None:
        return self.base.candidates(queries, budget, sequences)

    def search(self, queries: Tensor, budget: Budget, sequences: list[int]) -> Selection:
        found = self.base.search(queries, budget, sequences)
        grouped = search_queries(queries, self._kv_heads, self._gqa).double()
        kept = []
        for ids, query, b in zip(found.ids.to(queries.device), grouped, sequences, strict=True):
            logits = torch.einsum("hgd,hkd->hgk", query, self._keys(b, ids)) * budget.scaling
            kept.append(prune(ids, logits, self._gqa, self._config.p))
        return replace(stack_selections(kept), estimated=found.estimated)

    def _keep(self, sequence: int, keys: Tensor) -> None:
        packed = quantise(keys, self._config.bits)
        self._codes.append(sequence, packed.codes)
        self._ranges.append(sequence, packed.ranges)

    def _keys(self, sequence: int, ids: Tensor) -> Tensor:
        """Estimated keys fp64 `[H_kv, K, D]` of ids int32 `[H_kv, K]`; anything where an id is -1."""
        at = ids.long().clamp_min(0).unsqueeze(-1)
        tables = (table.view(sequence) for table in (self._codes, self._ranges))
        return restore(Quantised(*(rows.gather(1, at.expand(-1, -1, rows.shape[2])) for rows in tables)), self._config.bits)


def pruned_nbytes(shape: LayerShape, config: TopP, tokens: int) -> int:
    """Device bytes that pruning adds per sequence."""
    return shape.kv_heads * tokens * (code_bytes(shape.head_dim, config.bits) + 8)

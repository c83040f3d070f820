"""ParisKV's codes in an engine's pages, written and searched by numba. On a GPU kernels use the same layout (`step.device`)."""

from __future__ import annotations

import torch
from torch import Tensor

from kvrecall.core.structs import Budget, Selection
from kvrecall.index.base import LayerShape, PagedIndex, sink_ids
from kvrecall.index.sphere.config import SphereConfig
from kvrecall.index.sphere.maps import Maps
from kvrecall.index.sphere.pages import CodeLayout, LentPages
from kvrecall.index.sphere.schedule import stage_sizes
from kvrecall.select.gqa import search_queries


class PagedCodes(PagedIndex):
    """Codes of one layer; no counts of sign patterns, so stage I is `product`."""

    def __init__(self, index: SphereConfig, shape: LayerShape, block_size: int) -> None:
        self._index, self._heads = index, shape.kv_heads
        self._layout: CodeLayout = index.layout(shape, block_size)
        self._maps = Maps.of(shape, index)

    def bind(self, pages: Tensor, rows: Tensor) -> None:
        self._pages, self._codes = LentPages(self._layout, pages), self._layout.codes(pages)

    def store(self, keys: Tensor, first: int, slots: Tensor) -> None:
        from kvrecall.index.sphere import cpu_encode

        index, maps, size = self._index, self._maps, self._layout.block_size
        centre = maps.centres(first, keys.shape[1])
        made = cpu_encode.encode(keys, maps.keys, index.stored_dtype, centre, index.norms, first)
        for place, part in zip(self._codes.parts, made.parts, strict=True):
            place[slots // size, :, slots % size] = part.transpose(0, 1)

    def search(self, queries: Tensor, tables: list[list[int]], ends: list[int], sinks: int, budget: Budget) -> Selection:
        from kvrecall.index.sphere import cpu

        index, maps = self._index, self._maps
        grouped = search_queries(queries, self._heads, index.gqa)
        shifts = [maps.shifts(query, end) for query, end in zip(grouped, ends, strict=True)]
        sizes = [stage_sizes(index.steps, end, budget.top_k, index.min_candidates_per_k) for end in ends]
        count = len(tables)
        # Keys of zero norm are not counted in pages, so every search reads the weights.
        return cpu.search_batch(
            self._pages, tables, torch.zeros(1, 1, 1, 1, dtype=torch.int32, device="cpu"), ends, [True] * count,
            list(range(count)), maps.rotate(grouped), sizes, budget, index.gqa, [sink_ids(self._heads, sinks)] * count,
            index.stage1, shifts,
        )  # fmt: skip

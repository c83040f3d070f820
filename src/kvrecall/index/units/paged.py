"""Pages of tokens in an engine's blocks, driven by the host (`PagedPages`); on a GPU `paged_kernels`.

Pages are counted from the beginning of a sequence and do not cross block borders. A page is summarised when its last token is
stored. So its representation follows from its own keys alone, also where sinks end or the window begins inside it; of such a
page only tokens of the zone are found.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvrecall.core.launch import cdiv
from kvrecall.core.structs import Budget, Selection
from kvrecall.index.base import LayerShape, PagedIndex, stack_selections
from kvrecall.index.table import numbers_in
from kvrecall.index.units import Units, search_units
from kvrecall.index.units.volumes import PageKind, page_scores, volumes
from kvrecall.select.gqa import search_queries


def pages_in(pages: Tensor, kind: PageKind, shape: LayerShape, block_size: int) -> Tensor:
    """View `[blocks, H_kv, block_size / page_tokens, ·]` of the representations in pages uint8 `[blocks, n]`."""
    return numbers_in(pages, 0, shape.dtype, shape.kv_heads, block_size // kind.tokens, kind.points * shape.head_dim)


class PagedPages(PagedIndex):
    """Pages of one layer."""

    def __init__(self, kind: PageKind, shape: LayerShape, block_size: int) -> None:
        self._kind, self._shape, self._size = kind, shape, block_size

    def bind(self, pages: Tensor, rows: Tensor) -> None:
        self._reps, self._rows = pages_in(pages, self._kind, self._shape, self._size), rows

    def store(self, keys: Tensor, first: int, slots: Tensor) -> None:
        page, size = self._kind.tokens, self._size
        last = slots[(-first - 1) % page :: page]  # of each page that ends here
        if not len(last):
            return
        blocks, numbers = last // size, last % size // page
        whole = self._rows[:, :, :, 0].unflatten(2, (-1, page))[blocks, :, numbers]  # [pages, H_kv, page, D]
        made = volumes(whole.transpose(0, 1).flatten(1, 2), page, self._kind.bounds)
        self._reps[blocks, :, numbers] = made.transpose(0, 1)

    def search(self, queries: Tensor, tables: list[list[int]], ends: list[int], sinks: int, budget: Budget) -> Selection:
        kind, heads, found = self._kind, self._shape.kv_heads, []
        grouped = search_queries(queries, heads, kind.gqa)
        for query, table, end in zip(grouped, tables, ends, strict=True):
            count = cdiv(end, kind.tokens)
            reps = self._reps[table[: cdiv(end, self._size)]].transpose(0, 1).flatten(1, 2)[:, :count]
            members = torch.arange(end, dtype=torch.int32, device="cpu").expand(heads, -1).contiguous()
            offsets = torch.arange(count + 1, dtype=torch.int32, device="cpu") * kind.tokens
            units = Units(reps, members, offsets.clamp(min(sinks, end), end).expand(heads, -1).contiguous())
            scores = page_scores(query, units.reps, kind)
            found.append(search_units(scores, units, kind.gqa, Budget(min(budget.top_k, end - sinks), budget.scaling)))
        return stack_selections(found)

"""Page means in a device step: means in the blocks of the slots' sequences, attended to as parts of the step's merge."""

# Kernel launches take arguments that type checkers do not know.
# pyright: reportCallIssue=false, reportIndexIssue=false, reportArgumentType=false

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from kvrecall.cache.slot_zones import SlotZones
from kvrecall.cache.zones import ZoneLengths
from kvrecall.core.launch import cdiv, next_power_of_2, overlapping
from kvrecall.core.structs import AttentionParams
from kvrecall.index.base import Index
from kvrecall.index.page_means.kernels import page_means_kernel, pages_at_once
from kvrecall.index.step import IndexStep, SlotSpec, SlotStep

if TYPE_CHECKING:
    from kvrecall.index.page_means.index import PageMeansIndex

_MOST_PARTS = 32
"""The most parts that one merge takes besides the others."""


class SlotMeans:
    """The number of pages of every slot, and the launch that attends to their means, as `parts` parts of the merge."""

    def __init__(self, like: PageMeansIndex, spec: SlotSpec) -> None:
        """like: any index of this kind. spec: of the step."""
        self.memory, self.page_tokens, self._table = like.means.memory, like.page_tokens, spec.host.blocks
        capacity = max(1, spec.tokens // self.page_tokens)
        self._tile = pages_at_once(spec.shape.head_dim, spec.shape.dtype.itemsize)
        self.parts = min(_MOST_PARTS, cdiv(capacity, self._tile))
        self.pages = torch.zeros(spec.slots, dtype=torch.int32, device=self._table.device)
        """int32 `[slots]`: whole pages."""

    def attend(
        self, queries: Tensor, ids: Tensor, out: Tensor, lse: Tensor, first: int, params: AttentionParams, pairs: range
    ) -> None:
        """Fills parts from `first` on of out fp32 `[B, H_q, P, D]` and lse `[B, H_q, P]`, for `pairs` of sequences and KV
        heads.

        queries: `[B, H_q, 1, D]`; ids int32 `[…, K]`: the selections, in the order of the pairs, padded with -1.
        """
        (_, query_heads, parts, dim), means, layout = out.shape, self.memory.rows, self.memory.layout
        top_k, heads = ids.shape[-1], layout.heads
        page_means_kernel[(len(pairs) * self.parts,)](
            queries, means, self._table, self.pages, ids, out, lse, params.scaling, params.softcap, heads, pairs.start,
            self._table.stride(0), means.stride(0), layout.rows, top_k, self.page_tokens, 0, BLOCK=layout.block_size, D=dim,
            BD=next_power_of_2(dim), G=query_heads // heads, W=self._tile, BK=next_power_of_2(top_k), SHARES=self.parts,
            FIRST=first, PARTS=parts, CAP=params.softcap != 0, num_warps=4, **overlapping(queries.device),
        )  # fmt: skip


class PageMeansStep(IndexStep):
    """The step of another index, with page means besides its selection.

    Pages become whole between two steps, when a zone grows. The host computes their means then (`catch_up`).
    """

    def __init__(self, index: PageMeansIndex, spec: SlotSpec) -> None:
        super().__init__(spec)
        self._means = SlotMeans(index, spec)
        self.base = base = index.base.slot_step(replace(spec, estimates=self._means))
        """The step of the inner index."""
        self.ids, self.counts, self.width, self.spread = base.ids, base.counts, base.width, base.spread
        self.estimated_parts = base.estimated_parts
        self._kind = type(index)
        self._joined: dict[int, tuple[PageMeansIndex, int]] = {}
        self._counts: dict[int, int] = {}

    def fits(self, index: Index, zones: list[ZoneLengths], room: int) -> bool:
        if type(index) is not self._kind or _around(index).means.memory is not self._means.memory:
            return False
        return self.base.fits(_around(index).base, zones, room)

    def join(self, slot: int, index: Index, sequence: int, zones: ZoneLengths, window: Tensor, budget: int, room: int) -> None:
        known = _around(index)
        self.base.join(slot, known.base, sequence, zones, window, budget, room)
        self._joined[slot], self._counts[slot] = (known, sequence), 0
        self.catch_up(slot, zones.retrieval)

    def search(self, queries: Tensor, fire: Tensor, zones: SlotZones, scaling: float) -> None:
        self.base.search(queries, fire, zones, scaling)

    def search_early(self, queries: Tensor, fire: Tensor, zones: SlotZones, scaling: float) -> None:
        self.base.search_early(queries, fire, zones, scaling)

    def step(self, asked: SlotStep) -> Tensor:
        return self.base.step(asked)

    def leave(self, slot: int, index: Index, sequence: int, tokens: int, keys: Callable[[], Tensor]) -> None:
        self.base.leave(slot, _around(index).base, sequence, tokens, keys)

    def forget(self, slot: int, index: Index, sequence: int) -> None:
        self.base.forget(slot, _around(index).base, sequence)
        self._joined.pop(slot, None)
        self._counts.pop(slot, None)
        self._means.pages[slot] = 0

    def lacks(self, slot: int, tokens: int) -> bool:
        return tokens // self._means.page_tokens > self._counts[slot]

    def catch_up(self, slot: int, tokens: int) -> None:
        index, sequence = self._joined[slot]
        index.catch_up(sequence, tokens)
        self._means.pages[slot] = self._counts[slot] = index.means.lengths[sequence]

    def estimated(self, slot: int) -> int:
        return self._counts[slot] * self.spec.shape.kv_heads


def _around(index: Index) -> PageMeansIndex:
    return cast("PageMeansIndex", index)

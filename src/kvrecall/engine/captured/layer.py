"""One layer of a captured decode: device memory at fixed addresses, and the launches of a step."""

# A launch takes what only Triton knows.
# pyright: reportCallIssue=false, reportIndexIssue=false, reportArgumentType=false

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from kvrecall.cache.zones import ZoneLengths
from kvrecall.core.launch import cdiv, next_power_of_2, overlapping
from kvrecall.core.structs import AttentionParams, Held
from kvrecall.engine.captured.base import Group, SlotLayer, adopt_held, count_steps, keeps_rows
from kvrecall.engine.captured.branches import beside, branches, divided
from kvrecall.engine.captured.kernels import step_kernel
from kvrecall.engine.captured.plan import ROW, SEARCH_FIELDS, StepPlan
from kvrecall.engine.captured.trigger import DeviceTrigger
from kvrecall.engine.captured.window import places
from kvrecall.index.page_means import PageMeansIndex
from kvrecall.index.page_means.step import PageMeansStep
from kvrecall.index.sphere import SphereIndex
from kvrecall.index.sphere.codes import BLOCK, CENTROIDS, MIN_ALPHA, magnitude_levels, magnitude_thresholds, weight_range
from kvrecall.index.sphere.kernels.encode import Centring
from kvrecall.index.sphere.kernels.search import GpuSearch, Tables
from kvrecall.index.sphere.turns import SPAN
from kvrecall.layer.state import LayerState
from kvrecall.merge.cuda import merge_step

_CHOSEN_ROWS, _RESIDENT_ROWS, _PART_WARPS = 16, 64, 4
"""Selected rows or resident rows per program of the split attention, and its warps. Reads of the host are spread widely."""
_ENCODED_ROWS = 32
"""Coordinates per program that encodes a token."""


def searched(state: LayerState) -> SphereIndex | None:
    """The sphere index that a layer searches, which another index may complete; None for a layer of another kind."""
    index = state.index.base if isinstance(state.index, PageMeansIndex) else state.index
    return index if isinstance(index, SphereIndex) else None


class CapturedLayer(SlotLayer):
    """A layer with a sphere index, whose sequences all search.

    The window of a slot is a ring: a token stays in its row until it leaves, and nothing is shifted.
    """

    def __init__(
        self, like: LayerState, slots: int, plan: StepPlan, tokens: int, table: Tensor, plan_rows: Tensor | None = None
    ) -> None:
        """tokens: most tokens behind the sink. table: int32 `[slots, W]`, the blocks of each slot's sequence. plan_rows: where
        `step` finds the rows of the plan."""
        super().__init__(like, slots)
        self._plan_rows = plan_rows
        index = searched(like)
        assert like.index is not None and index is not None
        shape, device, maps = self.shape, self.shape.device, index.maps
        self._maps, self._plan, self._tokens = maps, plan, tokens
        self._collides = index.config.stage1 == "collision"
        self._group = shape.query_heads // shape.kv_heads
        self._padded = next_power_of_2(shape.head_dim)
        b, heads, dim, k = slots, shape.kv_heads, shape.head_dim, like.top_k
        self._heads, self._dim, self._pairs = heads, dim, b * heads
        self._centring = Centring.of(maps, tokens)
        self._host = like.store.on_host(table)
        self._pages = index.pages
        sizes = slots, shape.kv_heads, shape.head_dim // BLOCK, CENTROIDS
        counts = torch.zeros(sizes, dtype=torch.int32, device=device)
        self.tables = Tables(index.pages.codes, table, counts, torch.zeros(sizes[:2], dtype=torch.int32, device=device))
        """What searches read. Rows and codes of a sequence lie in the same blocks."""
        self._page_means = None
        if isinstance(like.index, PageMeansIndex):
            self._page_means = PageMeansStep(like.index, slots, tokens)

        def zeros(*size: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(*size, dtype=dtype, device=device)

        self._rows = zeros(b, heads, plan.sizes.sink_tokens + plan.ring, 2, dim, dtype=shape.dtype)
        self._live = torch.zeros_like(self.tables.counts)
        config = index.config
        self._trigger = DeviceTrigger(like, slots, heads if like.method.trigger_config().name == "speculative" else 1)
        # Where each KV head may search again, it is a sequence of its own.
        sequences = (b * heads, 1) if self._trigger.early else (b, heads)
        self._pair_plan = zeros(b * heads, ROW)
        self._search = GpuSearch(*sequences, self._group, dim, config.gqa, config.stage1, k, tokens,
                                 plan.most_candidates(tokens), maps, ROW, config.norms)  # fmt: skip
        # A search that is rarely made again, or by few heads, is not worth more launches.
        count = branches(b * heads, tokens) if self._trigger.every_step else 1
        self._branches = divided(self._search.pairs, count)
        self._options = overlapping(device)
        self._levels = magnitude_levels(device)
        self._thresholds = magnitude_thresholds(device)
        self._parts = cdiv(k, _CHOSEN_ROWS) + cdiv(self._rows.shape[2], _RESIDENT_ROWS)
        every_part = self._parts + (self._page_means.parts if self._page_means else 0)
        self._part_out = zeros(b, shape.query_heads, every_part, dim, dtype=torch.float32)
        self._part_lse = zeros(b, shape.query_heads, every_part, dtype=torch.float32)
        # The kept rows matter where a selection outlives a step, or where rows that are selected again are not read again.
        self._reuse = keeps_rows(like, slots)
        self._kept = zeros(2, b, heads, k if self._reuse else 0, 2, dim, dtype=shape.dtype)
        self._kept_ids = torch.full((2, b, heads, k), -1, dtype=torch.int32, device=device)
        self.read = zeros(b, dtype=torch.int64)
        """Rows read from the host since each sequence joined."""
        self.bad = zeros(b)
        self._scaling = like.scaling
        self._resident: dict[int, int] = {}  # tokens attended outside the retrieval zone, by slot
        self._estimated: dict[int, int] = {}  # pages whose attention was estimated, by slot

    def fits(self, state: LayerState, room: int) -> bool:
        index, zones = searched(state), [state.store.zones(b) for b in range(state.store.sequences)]
        return (
            index is not None
            and type(state.index) is (PageMeansIndex if self._page_means else SphereIndex)
            and index.maps is self._maps
            and index.pages is self._pages
            and max(z.total - z.sink for z in zones) + room < self._tokens
        )

    def _join(self, group: Group, room: int) -> None:
        state, index = group.state, searched(group.state)
        assert index is not None
        index.reserve(max(z.total - z.sink for z in map(state.store.zones, range(state.store.sequences))) + room + 1)
        group.first = [state.store.zones(b).retrieval for b in range(state.store.sequences)]
        self._scaling = state.scaling
        for b, slot in enumerate(group.slots):
            zones = state.store.zones(b)
            self._fill_ring(slot, state.store.resident.view(b), zones)
            buffer = self._buffer(slot, zones)
            # Tokens that wait in the buffer are stored and encoded now, as `leave` does it for later ones in their own steps.
            state.store.host[b].write(zones.retrieval, buffer.cpu())  # graphs wait for no copy
            self.tables.counts[slot] = index.counts[b]
            self._live[slot] = index.counts[b]
            if zones.buffer:
                index.encode_ahead(b, buffer[:, :, 0], zones.retrieval)
                index.add_counts(self._live[slot], b, zones.retrieval, zones.retrieval + zones.buffer, 1)
            self.tables.zero_norms[slot] = index.zero_norms[b]
            for what in (self.read, self.bad):
                what[slot] = 0
            self._kept_ids[:, slot] = -1
            self._resident[slot] = self._estimated[slot] = 0
            if self._page_means:
                self._page_means.join(slot, state.index, b, zones.retrieval)
        adopt_held(group, *self._found())
        self._trigger.join(group)

    @property
    def early(self) -> bool:
        return self._trigger.early

    def search_early(self) -> None:
        assert self._plan_rows is not None
        self._spread(self._plan_rows)
        trigger, scaling = self._trigger, self._scaling
        self._search.launch(trigger.before, self.tables, self._pair_plan, trigger.always.view(-1), scaling)

    def step(self, queries: Tensor, keys: Tensor, values: Tensor, parity: Tensor, params: AttentionParams) -> Tensor:
        assert self._plan_rows is not None
        return self.decode(queries, keys, values, self._plan_rows, parity, params)

    def decode(
        self, queries: Tensor, keys: Tensor, values: Tensor, plan: Tensor, parity: Tensor, params: AttentionParams
    ) -> Tensor:
        """As `step`. plan: int32 `[slots, ROW]`."""
        queries, keys, values = queries.contiguous(), keys.contiguous(), values.contiguous()
        self._trigger.launch(queries)

        def part(pairs: range) -> None:
            self._search_for(pairs, queries, plan, params.scaling)
            self._attend(queries, keys, values, plan, parity, params, pairs)
            if self._page_means:
                self._page_means.attend(queries, self._search.ids, self._part_out, self._part_lse, self._parts, params, pairs)

        beside(self._branches, queries, part)
        return self._merge(queries, params)

    def moved_on(self) -> None:
        super().moved_on()
        for group in self.groups:
            for slot in group.slots:
                self._resident[slot] += self._plan.attended(slot)
                if self._page_means:
                    self._estimated[slot] += self._page_means.pages(slot) * self._heads

    def renew(self) -> None:
        """Pages that have become whole are taken in before they are attended to."""
        if not self._page_means:
            return
        for group in self.groups:
            for b, slot in enumerate(group.slots):
                tokens = self._plan.zones[slot].retrieval
                if self._page_means.lacks(slot, tokens):
                    with self._stored(group.state, b, tokens):
                        self._page_means.catch_up(slot, tokens)

    @contextmanager
    def _stored(self, state: LayerState, b: int, tokens: int) -> Iterator[None]:
        """Inside, the host pool of a sequence counts the tokens that steps have stored there."""
        pool = state.store.host[b]
        before = pool.length
        pool.extend(tokens)
        try:
            yield
        finally:
            pool.extend(before)  # the store is as it was until the sequence leaves

    def _give_back(self, group: Group) -> None:
        state, index = group.state, searched(group.state)
        assert index is not None
        ids, counts = self._found()
        for b, slot in enumerate(group.slots):
            zones = self._plan.zones[slot]
            state.store.host[b].extend(zones.retrieval)
            index.extend(b, zones.retrieval)
            index.zero_norms[b] |= self.tables.zero_norms[slot]
            state.store.resident.replace(b, 0, self._in_order(slot, zones))
            state.held[b] = Held(ids[slot].clone(), counts[slot].clone(), zones.retrieval)
        state.fetched = {}
        state.non_finite |= self.bad[group.slots].bool()
        self._count(group)

    def _forget(self, group: Group) -> None:
        if self._page_means:
            for slot in group.slots:
                self._page_means.leave(slot)

    def _found(self) -> tuple[Tensor, Tensor]:
        """Ids `[slots, H_kv, K]` and counts `[slots, H_kv]` of the last searches, as views."""
        size = (self.shape.sequences, self._heads)
        return self._search.ids.view(*size, -1), self._search.counts.view(size)

    def _search_for(self, pairs: range, queries: Tensor, plan: Tensor, scaling: float) -> None:
        """Searches wherever the trigger has fired."""
        plan = self._pair_plan if self._trigger.early else plan
        self._search.launch(queries, self.tables, plan, self._trigger.fire.view(-1), scaling, pairs)

    def _spread(self, plan: Tensor) -> None:
        """Gives every KV head the row of its sequence."""
        self._pair_plan.view(plan.shape[0], self._heads, -1).copy_(plan.unsqueeze(1).expand(-1, self._heads, -1))

    def _attend(
        self, queries: Tensor, keys: Tensor, values: Tensor, plan: Tensor, parity: Tensor, params: AttentionParams,
        pairs: range | None = None,
    ) -> None:  # fmt: skip
        """Selected rows, resident rows and the token that leaves, in one launch for `pairs`, by default all."""
        pairs = pairs or self._search.pairs
        k, maps = self._search.top_k, self._maps
        tables, centring, centred, host = self.tables, self._centring, maps.means is not None, self._host
        codes, measured = tables.codes, tables.codes.norms is not None
        pieces = cdiv(self._dim, _ENCODED_ROWS) + measured
        least, most = weight_range(codes.weights.dtype, centred)
        step_kernel[(len(pairs) * (self._parts + pieces),)](
            queries, keys, values, self._rows, plan, self.bad, self._search.ids, host.rows, host.blocks, self._kept_ids,
            self._kept, parity, self.read, self._part_out, self._part_lse, maps.keys, centring.means, centring.cos,
            centring.sin, self._levels, self._thresholds, codes.signs, codes.magnitudes, codes.weights,
            codes.norms if measured else codes.signs, tables.counts, self._live, tables.zero_norms,
            params.scaling, params.softcap, self._heads, host.blocks.stride(0), pairs.start, self._rows.shape[2], ROW,
            self._plan.sizes.sink_tokens, self._pairs, k, codes.signs.stride(0), maps.stride, centring.between,
            most, least, MIN_ALPHA,
            BLOCK=host.block_size, D=self._dim, BD=self._padded, S=self._dim // BLOCK, ROWS=_ENCODED_ROWS, G=self._group,
            R=_CHOSEN_ROWS, W=_RESIDENT_ROWS, BK=next_power_of_2(k), CHOSEN=cdiv(k, _CHOSEN_ROWS), PIECES=pieces,
            PARTS=self._parts, OTHERS=self._part_out.shape[2] - self._parts, FIRST=SEARCH_FIELDS, CAP=params.softcap != 0,
            REUSE=self._reuse, COUNTS=self._collides, SPAN=SPAN, CENTRED=centred, NORMS=measured, num_warps=_PART_WARPS,
            **self._options,
        )  # fmt: skip

    def _merge(self, queries: Tensor, params: AttentionParams) -> Tensor:
        return merge_step(queries, self._part_out, self._part_lse, params.sink_logits)

    def _fill_ring(self, slot: int, rows: Tensor, zones: ZoneLengths) -> None:
        """Copies the resident rows `[H_kv, n, 2, D]` of a sequence, each window row to the place that its position gives it."""
        self._rows[slot, :, : zones.sink] = rows[:, : zones.sink]
        self._rows[slot, :, self._window(zones)] = rows[:, zones.sink :]

    def _buffer(self, slot: int, zones: ZoneLengths) -> Tensor:
        """Rows `[H_kv, n, 2, D]` of the tokens that wait in the buffer of a sequence, oldest first."""
        return self._rows[slot, :, self._window(zones)[: zones.buffer]]

    def _in_order(self, slot: int, zones: ZoneLengths) -> Tensor:
        """Resident rows of a sequence as the store keeps them: sink, then the window, oldest first."""
        return torch.cat([self._rows[slot, :, : zones.sink], self._rows[slot, :, self._window(zones)]], 1)

    def _window(self, zones: ZoneLengths) -> Tensor:
        """The rows that hold the window of a sequence, oldest first."""
        at = places(zones.retrieval, zones.local + zones.buffer, self._plan.ring, self.shape.device)
        return self._plan.sizes.sink_tokens + at

    def _count(self, group: Group) -> None:
        """Adds what the steps did to the counters; synchronises."""
        slots, steps = group.slots, group.steps
        count_steps(
            group.state, steps, searches=self._trigger.give_back(group), resident=sum(self._resident[s] for s in slots),
            selected=steps * len(slots) * self._heads * self._search.top_k, static=0, read=int(self.read[slots].sum()),
            moved=sum(self._plan.zones[s].retrieval for s in slots) - sum(group.first),
            estimated=sum(self._estimated[s] for s in slots),
        )  # fmt: skip

"""One layer of a captured decode: device memory at fixed addresses, and the launches of a step."""

# A launch takes what only Triton knows.
# pyright: reportCallIssue=false, reportIndexIssue=false, reportArgumentType=false

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from kvrecall.core.launch import cdiv, next_power_of_2, overlapping
from kvrecall.core.structs import AttentionParams, Held
from kvrecall.engine.captured.base import CapturedState, adopt_held, count_steps, keeps_rows
from kvrecall.engine.captured.branches import beside, branches, divided
from kvrecall.engine.captured.kernels import step_kernel
from kvrecall.engine.captured.plan import ROW, SEARCH_FIELDS, StepPlan
from kvrecall.engine.captured.trigger import DeviceTrigger
from kvrecall.engine.captured.window import places
from kvrecall.index.page_means import PageMeansIndex
from kvrecall.index.page_means.step import PageMeansStep
from kvrecall.index.sphere import SphereIndex
from kvrecall.index.sphere.codes import BLOCK, MIN_ALPHA, magnitude_levels, magnitude_thresholds, weight_range
from kvrecall.index.sphere.kernels.encode import Centring
from kvrecall.index.sphere.kernels.search import GpuSearch
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


class CapturedLayer(CapturedState):
    """A layer with a sphere index, whose sequences all search.

    While it is captured the window is a ring: a token stays in its row until it leaves, and nothing is shifted.
    """

    def __init__(self, state: LayerState, plan: StepPlan, tokens: int, plan_rows: Tensor | None = None) -> None:
        """tokens: length of the retrieval zone to make room for. plan_rows: where `step` finds the rows of the plan."""
        super().__init__(state)
        self._plan_rows = plan_rows
        index = searched(state)
        assert state.index is not None and index is not None
        shape, device = state.shape, state.shape.device
        self._index, self._plan_of_all = index, plan
        self._collides = index.config.stage1 == "collision"
        self._group = shape.query_heads // shape.kv_heads
        self._padded = next_power_of_2(shape.head_dim)
        b, heads, dim, k = shape.sequences, shape.kv_heads, shape.head_dim, state.top_k
        self._heads, self._dim, self._pairs = heads, dim, b * heads
        state.index.reserve(tokens)
        self._centring = Centring.of(index.maps, tokens)
        self._page_means = None
        if isinstance(state.index, PageMeansIndex):
            self._page_means = PageMeansStep(state.index, [zones.retrieval for zones in plan.zones])
        self._table = state.store.reach(tokens)

        def zeros(*size: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(*size, dtype=dtype, device=device)

        self._rows = zeros(b, heads, plan.sizes.sink_tokens + plan.ring, 2, dim, dtype=shape.dtype)
        self._fill_ring()
        self._first = [zones.retrieval for zones in plan.zones]
        self._first_counts, self._live = index.counts.clone(), index.counts.clone()
        for i in range(b):
            self._store_buffer(i)
            self._encode_buffer(i)
        config = index.config
        self._trigger = DeviceTrigger(state, heads if state.method.trigger_config().name == "speculative" else 1)
        # Where each KV head may search again, it is a sequence of its own.
        sequences = (b * heads, 1) if self._trigger.early else (b, heads)
        self._pair_plan = zeros(b * heads, ROW)
        self._search = GpuSearch(*sequences, self._group, dim, config.gqa, config.stage1, k, tokens,
                                 plan.most_candidates(tokens), index.maps, ROW, config.norms)  # fmt: skip
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
        self._reuse = keeps_rows(state)
        self._kept = zeros(2, b, heads, k if self._reuse else 0, 2, dim, dtype=shape.dtype)
        self._kept_ids = torch.full((2, b, heads, k), -1, dtype=torch.int32, device=device)
        self.read = zeros(b, dtype=torch.int64)
        """Rows read from the host so far, per sequence."""
        self.bad = zeros(b)
        adopt_held(self.state, *self._found())

    @property
    def early(self) -> bool:
        return self._trigger.early

    def step(self, queries: Tensor, keys: Tensor, values: Tensor, parity: Tensor, params: AttentionParams) -> Tensor:
        assert self._plan_rows is not None
        return self.decode(queries, keys, values, self._plan_rows, parity, params)

    def search_early(self) -> None:
        assert self._plan_rows is not None
        self._spread(self._plan_rows)
        trigger = self._trigger
        self._search.launch(trigger.before, self._index.tables(), self._pair_plan, trigger.always.view(-1), self.state.scaling)

    def decode(
        self, queries: Tensor, keys: Tensor, values: Tensor, plan: Tensor, parity: Tensor, params: AttentionParams
    ) -> Tensor:
        """One token per sequence, as `pipeline.decode_step`; queries `[B, H_q, 1, D]`, keys, values `[B, H_kv, 1, D]`.

        plan int32 `[B, ROW]`; parity int64 `[1]`, the step's number modulo 2.
        """
        queries, keys, values = queries.contiguous(), keys.contiguous(), values.contiguous()
        self._trigger.launch(queries)

        def part(pairs: range) -> None:
            self._search_for(pairs, queries, plan, params.scaling)
            self._attend(queries, keys, values, plan, parity, params, pairs)
            if self._page_means:
                self._page_means.attend(queries, self._search.ids, self._part_out, self._part_lse, self._parts, params, pairs)

        beside(self._branches, queries, part)
        return self._merge(queries, params)

    def _search_for(self, pairs: range, queries: Tensor, plan: Tensor, scaling: float) -> None:
        """Searches wherever the trigger has fired."""
        plan = self._pair_plan if self._trigger.early else plan
        self._search.launch(queries, self._index.tables(), plan, self._trigger.fire.view(-1), scaling, pairs)

    def forget_trial(self) -> None:
        """Undoes what a trial run counted, found and remembered."""
        self.read.zero_()
        self.bad.zero_()
        self._kept_ids.fill_(-1)
        adopt_held(self.state, *self._found())
        self._trigger.adopt()

    def moved_on(self) -> None:
        if not self._page_means:
            return
        self._page_means.count()
        for b, zones in enumerate(self._plan_of_all.zones):
            if self._page_means.lacks(b, zones.retrieval):
                with self._stored(b, zones.retrieval):
                    self._page_means.catch_up(b, zones.retrieval)

    @contextmanager
    def _stored(self, b: int, tokens: int) -> Iterator[None]:
        """Inside, the host pool of a sequence counts the tokens that steps have stored there."""
        pool = self.state.store.host[b]
        before = pool.length
        pool.extend(tokens)
        try:
            yield
        finally:
            pool.extend(before)  # the store is as it was before the capture until `finish`

    def finish(self) -> None:
        """Gives the state back as if the steps had been made uncaptured."""
        state, index, plan = self.state, self._index, self._plan_of_all
        index.counts.copy_(self._first_counts)
        ids, counts = self._found()
        for b, zones in enumerate(plan.zones):
            state.store.host[b].extend(zones.retrieval)
            index.extend(b, zones.retrieval)
            state.store.resident.replace(b, 0, self._in_order(b))
            state.held[b] = Held(ids[b].clone(), counts[b].clone(), zones.retrieval)
        state.fetched = {}
        state.non_finite |= self.bad.bool()
        self._count(plan.steps)

    def _found(self) -> tuple[Tensor, Tensor]:
        """Ids `[B, H_kv, K]` and counts `[B, H_kv]` of the last searches, as views."""
        size = (self.state.shape.sequences, self._heads)
        return self._search.ids.view(*size, -1), self._search.counts.view(size)

    def _spread(self, plan: Tensor) -> None:
        """Gives every KV head the row of its sequence."""
        self._pair_plan.view(plan.shape[0], self._heads, -1).copy_(plan.unsqueeze(1).expand(-1, self._heads, -1))

    def _attend(
        self, queries: Tensor, keys: Tensor, values: Tensor, plan: Tensor, parity: Tensor, params: AttentionParams,
        pairs: range | None = None,
    ) -> None:  # fmt: skip
        """Selected rows, resident rows and the token that leaves, in one launch for `pairs`, by default all."""
        pairs = pairs or self._search.pairs
        index, k, maps = self._index, self._search.top_k, self._index.maps
        tables, centring, centred, host = index.tables(), self._centring, maps.means is not None, self._table
        measured = tables.norms is not None
        pieces = cdiv(self._dim, _ENCODED_ROWS) + measured
        least, most = weight_range(tables.weights.dtype, centred)
        step_kernel[(len(pairs) * (self._parts + pieces),)](
            queries, keys, values, self._rows, plan, self.bad, self._search.ids, host.rows, host.blocks, self._kept_ids,
            self._kept, parity, self.read, self._part_out, self._part_lse, maps.keys, centring.means, centring.cos,
            centring.sin, self._levels, self._thresholds, tables.signs, tables.magnitudes, tables.weights,
            tables.norms if measured else tables.signs, tables.counts, self._live, tables.zero_norms,
            params.scaling, params.softcap, self._heads, host.blocks.stride(0), pairs.start, self._rows.shape[2], ROW,
            self._plan_of_all.sizes.sink_tokens, self._pairs, k, tables.signs.shape[2], maps.stride, centring.between,
            most, least, MIN_ALPHA,
            BLOCK=host.block_size, D=self._dim, BD=self._padded, S=self._dim // BLOCK, ROWS=_ENCODED_ROWS, G=self._group,
            R=_CHOSEN_ROWS, W=_RESIDENT_ROWS, BK=next_power_of_2(k), CHOSEN=cdiv(k, _CHOSEN_ROWS), PIECES=pieces,
            PARTS=self._parts, OTHERS=self._part_out.shape[2] - self._parts, FIRST=SEARCH_FIELDS, CAP=params.softcap != 0,
            REUSE=self._reuse, COUNTS=self._collides, SPAN=SPAN, CENTRED=centred, NORMS=measured, num_warps=_PART_WARPS,
            **self._options,
        )  # fmt: skip

    def _merge(self, queries: Tensor, params: AttentionParams) -> Tensor:
        return merge_step(queries, self._part_out, self._part_lse, params.sink_logits)

    def _fill_ring(self) -> None:
        """Copies the resident rows, each window row to the place that its position gives it."""
        for b, zones in enumerate(self._plan_of_all.zones):
            rows = self.state.store.resident.view(b)
            self._rows[b, :, : zones.sink] = rows[:, : zones.sink]
            self._rows[b, :, self._window(b)] = rows[:, zones.sink :]

    def _store_buffer(self, b: int) -> None:
        """Copies the tokens that wait in the buffer already to the host, as `leave` copies later ones in their own steps."""
        zones = self._plan_of_all.zones[b]
        self.state.store.host[b].write(zones.retrieval, self._buffer(b).cpu())  # graphs wait for no copy

    def _encode_buffer(self, b: int) -> None:
        """Encodes the tokens that wait in the buffer already, as `leave` encodes later ones in their own steps."""
        index, zones = self._index, self._plan_of_all.zones[b]
        if zones.buffer:
            signs = index.encode_ahead(b, self._buffer(b)[:, :, 0], slice(zones.retrieval, zones.retrieval + zones.buffer))
            index.add_counts(self._live[b], signs, 1)

    def _buffer(self, b: int) -> Tensor:
        """Rows `[H_kv, n, 2, D]` of the tokens that wait in the buffer of a sequence, oldest first."""
        return self._rows[b, :, self._window(b)[: self._plan_of_all.zones[b].buffer]]

    def _in_order(self, b: int) -> Tensor:
        """Resident rows of a sequence as the store keeps them: sink, then the window, oldest first."""
        sink = self._plan_of_all.zones[b].sink
        return torch.cat([self._rows[b, :, :sink], self._rows[b, :, self._window(b)]], 1)

    def _window(self, b: int) -> Tensor:
        """The rows that hold the window of a sequence, oldest first."""
        plan, zones = self._plan_of_all, self._plan_of_all.zones[b]
        at = places(zones.retrieval, zones.local + zones.buffer, plan.ring, self.state.shape.device)
        return plan.sizes.sink_tokens + at

    def _count(self, steps: int) -> None:
        """Adds what the steps did to the counters; synchronises."""
        selected = steps * self._pairs * self._search.top_k
        count_steps(
            self.state, steps, searches=self._trigger.give_back(steps), resident=self._plan_of_all.resident_tokens,
            selected=selected, static=0, read=int(self.read.sum()),
            moved=sum(z.retrieval for z in self._plan_of_all.zones) - sum(self._first),
            estimated=self._page_means.attended if self._page_means else 0,
        )  # fmt: skip

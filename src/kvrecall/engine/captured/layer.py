"""One layer of a captured decode: device memory at fixed addresses, and the launches of a step."""

# A launch takes what only Triton knows.
# pyright: reportCallIssue=false, reportIndexIssue=false, reportArgumentType=false

from __future__ import annotations

import torch
from torch import Tensor

from kvrecall.engine.captured.kernels import step_kernel, trigger_kernel
from kvrecall.engine.captured.plan import ROW, SEARCH_FIELDS, StepPlan
from kvrecall.index.sphere import SphereIndex
from kvrecall.index.sphere.codes import BLOCK, MIN_ALPHA, magnitude_levels, magnitude_thresholds
from kvrecall.index.sphere.kernels.search import GpuSearch, Tables
from kvrecall.launch import cdiv, next_power_of_2, overlapping
from kvrecall.layer_state import LayerState
from kvrecall.merge.kernels import merge_kernel
from kvrecall.structs import AttentionParams, Held
from kvrecall.trigger import BoundaryTrigger, EveryStep, SemanticBoundary, StrideTrigger, Trigger

_CHOSEN_ROWS, _RESIDENT_ROWS, _PART_WARPS = 16, 64, 4
"""Selected rows or resident rows per program of the split attention, and its warps. Reads of the host are spread widely."""
_ENCODED_ROWS = 32
"""Coordinates per program that encodes a token."""


class CapturedLayer:
    """Takes over a LayerState whose sequences all search, runs steps on it, and gives it back in `finish`.

    In between the window is a ring: a token stays in its row until it leaves, and nothing is shifted.
    """

    def __init__(self, state: LayerState, plan: StepPlan, tokens: int) -> None:
        """tokens: length of the retrieval zone to make room for."""
        assert isinstance(state.index, SphereIndex)
        shape, device = state.shape, state.shape.device
        self._state, self._index, self._plan_of_all = state, state.index, plan
        self._collides = state.index.config.stage1 == "collision"
        self._group = shape.query_heads // shape.kv_heads
        self._padded = next_power_of_2(shape.head_dim)
        b, heads, dim, k = shape.sequences, shape.kv_heads, shape.head_dim, state.top_k
        self._heads, self._dim, self._pairs = heads, dim, b * heads
        state.index.reserve(tokens)
        self._pools = [pool.consolidate(tokens) for pool in state.store.host]

        def zeros(*size: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(*size, dtype=dtype, device=device)

        self._hosts = torch.tensor([[p.data_ptr(), p.shape[1]] for p in self._pools], device=device)
        self._rows = zeros(b, heads, plan.sizes.sink_tokens + plan.ring, 2, dim, dtype=shape.dtype)
        self._fill_ring()
        self._first = [zones.retrieval for zones in plan.zones]
        self._first_counts, self._live = state.index._counts.clone(), state.index._counts.clone()
        self._encode_buffer()
        config = state.index.config
        self._search = GpuSearch(b, heads, self._group, dim, config.gqa, config.stage1, k, tokens,
                                 plan.most_candidates(tokens), state.index._rotation, ROW)  # fmt: skip
        self._options = overlapping(device)
        self._levels = magnitude_levels(device)
        self._thresholds = magnitude_thresholds(device)
        self._parts = cdiv(k, _CHOSEN_ROWS) + cdiv(self._rows.shape[2], _RESIDENT_ROWS)
        self._part_out = zeros(b, shape.query_heads, self._parts, dim, dtype=torch.float32)
        self._part_lse = zeros(b, shape.query_heads, self._parts, dtype=torch.float32)
        # The kept rows matter where a selection outlives a step, or where rows that are selected again are not read again.
        self._reuse = state.keeps_rows
        self._kept = zeros(2, b, heads, k if self._reuse else 0, 2, dim, dtype=shape.dtype)
        self._kept_ids = torch.full((2, b, heads, k), -1, dtype=torch.int32, device=device)
        self.read = zeros(b, dtype=torch.int64)
        """Rows read from the host so far, per sequence."""
        self.searches = zeros(b)
        self.bad = zeros(b)
        """Not 0 for sequences that were given a key or value that is not finite."""
        self._fire, self._since = torch.ones_like(self.searches), zeros(b)
        self._before = zeros(b, shape.query_heads, dim, dtype=torch.float32)
        self._adopt_trigger()

    def decode(
        self, queries: Tensor, keys: Tensor, values: Tensor, plan: Tensor, parity: Tensor, params: AttentionParams
    ) -> Tensor:
        """One token per sequence, as `pipeline.decode_step`; queries `[B, H_q, 1, D]`, keys, values `[B, H_kv, 1, D]`.

        plan int32 `[B, ROW]`; parity int64 `[1]`, the step's number modulo 2.
        """
        queries, keys, values = queries.contiguous(), keys.contiguous(), values.contiguous()
        self._fire_trigger(queries, plan)
        self._search.launch(queries, self._tables(), plan, self._fire, params.scaling)
        self._attend(queries, keys, values, plan, parity, params)
        return self._merge(queries, params)

    def forget_trial(self) -> None:
        """Undoes what a trial run counted, found and remembered."""
        self.read.zero_()
        self.searches.zero_()
        self.bad.zero_()
        self._kept_ids.fill_(-1)
        self._adopt_trigger()

    def finish(self) -> None:
        """Gives the state back as if the steps had been made uncaptured."""
        state, index, plan = self._state, self._index, self._plan_of_all
        index._counts.copy_(self._first_counts)
        for b, zones in enumerate(plan.zones):
            state.store.host[b].extend(zones.retrieval)
            index.extend(b, zones.retrieval)
            state.store.resident.replace(b, 0, self._in_order(b))
            state.held[b] = Held(self._search.ids[b].clone(), self._search.counts[b].clone(), zones.retrieval)
        state.fetched = {}
        state.trigger = self._trigger_state()
        state._non_finite |= self.bad.bool()
        self._count(plan.steps)

    def _tables(self) -> Tables:
        index = self._index
        return Tables(index._signs.rows, index._magnitudes.rows, index._weights.rows, index._counts, index._zero_norms)

    def _fire_trigger(self, queries: Tensor, plan: Tensor) -> None:
        config = self._state.method.trigger_config()
        if isinstance(config, EveryStep):
            return  # `_fire` is never anything but 1
        semantic = isinstance(config, SemanticBoundary)
        threshold, most, last = -2.0, 0, False
        if isinstance(config, SemanticBoundary):
            threshold, most = config.at(self._state.layer), config.max_stride or 0
            last = config.compare == "retrieval"
        trigger_kernel[(queries.shape[0],)](
            queries, self._before, self._since, plan, self._fire, self.searches, threshold, most, ROW,
            D=self._dim, BD=self._padded, H=queries.shape[1], FIRST=SEARCH_FIELDS, SEMANTIC=semantic, LAST=last, num_warps=1,
            **self._options,
        )  # fmt: skip

    def _attend(
        self, queries: Tensor, keys: Tensor, values: Tensor, plan: Tensor, parity: Tensor, params: AttentionParams
    ) -> None:
        """Selected rows, resident rows and the token that leaves, in one launch."""
        index, k = self._index, self._search.top_k
        pieces = cdiv(self._dim, _ENCODED_ROWS)
        step_kernel[(self._pairs, self._parts + pieces)](
            queries, keys, values, self._rows, plan, self.bad, self._search.ids, self._hosts, self._kept_ids, self._kept,
            parity, self.read, self._part_out, self._part_lse, index._rotation, self._levels, self._thresholds,
            index._signs.rows, index._magnitudes.rows, index._weights.rows, index._counts, self._live, index._zero_norms,
            params.scaling, params.softcap, self._heads, self._rows.shape[2], ROW, self._plan_of_all.sizes.sink_tokens,
            self._pairs, k, index._signs.rows.shape[2], torch.finfo(index._weights.rows.dtype).max, MIN_ALPHA,
            D=self._dim, BD=self._padded, S=self._dim // BLOCK, ROWS=_ENCODED_ROWS, G=self._group, R=_CHOSEN_ROWS,
            W=_RESIDENT_ROWS, BK=next_power_of_2(k), CHOSEN=cdiv(k, _CHOSEN_ROWS), PIECES=pieces, PARTS=self._parts,
            FIRST=SEARCH_FIELDS, CAP=params.softcap != 0, REUSE=self._reuse, COUNTS=self._collides, num_warps=_PART_WARPS,
            **self._options,
        )  # fmt: skip

    def _merge(self, queries: Tensor, params: AttentionParams) -> Tensor:
        out = torch.empty_like(queries)
        sinks = params.sink_logits
        merge_kernel[(queries.shape[0] * queries.shape[1],)](
            self._part_out, self._part_lse, self._part_lse if sinks is None else sinks, out, queries.shape[1],
            D=self._dim, BD=self._padded, PARTS=self._parts, BP=next_power_of_2(self._parts), SINKS=sinks is not None,
            num_warps=4, **self._options,
        )  # fmt: skip
        return out

    def _fill_ring(self) -> None:
        """Copies the resident rows, each window row to the place that its position gives it."""
        sizes, ring = self._plan_of_all.sizes, self._plan_of_all.ring
        for b, zones in enumerate(self._plan_of_all.zones):
            rows = self._state.store.resident.view(b)
            self._rows[b, :, : zones.sink] = rows[:, : zones.sink]
            self._rows[b, :, sizes.sink_tokens + self._places(zones.retrieval, zones.local + zones.buffer, ring)] = rows[
                :, zones.sink :
            ]

    def _encode_buffer(self) -> None:
        """Does for the tokens that wait in the buffer already what `leave` does for later ones in their own steps."""
        index = self._index
        for b, zones in enumerate(self._plan_of_all.zones):
            rows = self._state.store.resident.view(b, zones.sink)[:, : zones.buffer]
            if rows.shape[1]:
                at = slice(zones.retrieval, zones.retrieval + rows.shape[1])
                self._pools[b][:, at] = rows.cpu()
                codes = index._encode(rows[:, :, 0])
                index._signs.rows[b, :, at], index._magnitudes.rows[b, :, at] = codes.signs, codes.magnitudes
                index._weights.rows[b, :, at] = codes.weights
                index._zero_norms[b] |= (codes.weights == 0).all(-1).any(-1)
                index._add_counts(self._live[b], codes.signs, 1)

    def _in_order(self, b: int) -> Tensor:
        """Resident rows of a sequence as the store keeps them: sink, then the window, oldest first."""
        sizes, zones = self._plan_of_all.sizes, self._plan_of_all.zones[b]
        places = self._places(zones.retrieval, zones.local + zones.buffer, self._plan_of_all.ring)
        return torch.cat([self._rows[b, :, : zones.sink], self._rows[b, :, sizes.sink_tokens + places]], 1)

    def _places(self, first: int, count: int, ring: int) -> Tensor:
        return torch.arange(first, first + count, device=self._state.shape.device) % ring

    def _adopt_trigger(self) -> None:
        """Goes on where the trigger and the held selections of the uncaptured steps ended."""
        state = self._state
        for b, held in state.held.items():
            width = min(held.ids.shape[1], self._search.top_k)
            self._search.ids[b] = -1
            self._search.ids[b, :, :width] = held.ids[:, :width]
            self._search.counts[b] = held.counts
        if isinstance(state.trigger, BoundaryTrigger):
            for b, reference in enumerate(state.trigger._reference):
                if reference is not None:
                    self._before[b] = reference
            self._since.copy_(torch.tensor(state.trigger._since, dtype=torch.int32))

    def _trigger_state(self) -> Trigger:
        """The trigger as uncaptured steps would have left it."""
        trigger, steps = self._state.trigger, self._plan_of_all.steps
        if isinstance(trigger, BoundaryTrigger):
            trigger._reference = list(self._before.clone())
            trigger._since = self._since.tolist()
        elif isinstance(trigger, StrideTrigger):
            trigger._since = [since + steps for since in trigger._since]
        return trigger

    def _count(self, steps: int) -> None:
        """Adds what the steps did to the counters; synchronises."""
        state, stats = self._state, self._state.stats
        b, heads, k = state.shape.sequences, self._heads, self._search.top_k
        row = 2 * self._dim * state.shape.dtype.itemsize
        stats.steps += steps
        every = isinstance(state.method.trigger_config(), EveryStep)
        stats.searches += steps * b if every else int(self.searches.sum())
        stats.attended_rows += steps * b * heads
        selected = steps * b * heads * k
        stats.retrieved_tokens += selected
        stats.attended_tokens += heads * self._plan_of_all.resident_tokens + selected
        read = int(self.read.sum())
        stats.bytes_fetched += read * row
        stats.bytes_to_device += read * row
        stats.reused_rows += selected - read
        stats.bytes_saved += (selected - read) * row
        moved = sum(z.retrieval for z in self._plan_of_all.zones) - sum(self._first)
        stats.bytes_to_host += moved * heads * row

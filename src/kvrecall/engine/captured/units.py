"""A layer of a captured decode that searches units: pages (PRKV, Quest, …) or clusters and segments (LouisKV)."""

# A launch takes what only Triton knows.
# pyright: reportCallIssue=false, reportIndexIssue=false, reportArgumentType=false

from __future__ import annotations

import torch
from torch import Tensor

from kvrecall.attend.step import StepAttention
from kvrecall.core.errors import CaptureError
from kvrecall.core.structs import AttentionParams, Held
from kvrecall.engine.captured.base import CapturedState, adopt_held, count_steps, keeps_rows
from kvrecall.engine.captured.trigger import DeviceTrigger, Marks
from kvrecall.engine.captured.unit_tables import UnitTables
from kvrecall.engine.captured.window import QueryRing, places
from kvrecall.engine.captured.zone_kernels import ZONE_FIELDS
from kvrecall.index.unit_kernels.search import GpuUnitSearch
from kvrecall.index.units import UnitIndex
from kvrecall.layer.state import LayerState
from kvrecall.static.sets import StaticRefresh


class UnitLayer(CapturedState):
    """Zones and segments live in device memory: where a segment ends depends on the queries, which the host never sees.

    The window is a ring: a token stays in its row until it leaves. The work for the next static set is done between steps, a
    share of it at a time; when the set is due, the ordinary state is given back, gets the set, and is taken over again.
    """

    def __init__(self, state: LayerState, tokens: int) -> None:
        """tokens: tokens behind the sink to make room for. Raises CaptureError if the static set leaves nothing to search."""
        super().__init__(state)
        shape, sizes = state.shape, state.store.sizes
        index = state.index
        assert isinstance(index, UnitIndex)
        b, heads, dim, device = shape.sequences, shape.kv_heads, shape.head_dim, shape.device
        self._index, self._sizes, self._pairs = index, sizes, b * heads
        self._steps, self._begun, self._given_back = 0, 0, True
        self._begin_static()
        chosen = [0 if s is None else s.ids.shape[1] for s in state.static]
        top_k = state.top_k - min(chosen)
        if top_k < 1:
            self.abandon()
            raise CaptureError("the static set is the whole budget", "Lower its share, or decode uncaptured.")
        undecided = state.static_config is not None and None in state.static
        self._front = sizes.sink_tokens + (state.top_k if undecided else max(chosen))
        table = state.store.reach(tokens)
        ring = sizes.local_tokens + sizes.update_interval
        like = torch.empty(0, dtype=shape.dtype, device=device)
        self.attention = StepAttention(table, shape.query_heads, self._front, ring, top_k, keeps_rows(state), like)
        self.bad = self.attention.bad
        self.zone = torch.zeros(self._pairs, ZONE_FIELDS.value, dtype=torch.int32, device=device)
        self._marks = torch.zeros(b, tokens + 1, dtype=torch.uint8, device=device)
        marks = Marks(self._marks, self.zone.view(b, heads, -1)[:, 0, 5]) if state.marks_segments else None
        self.trigger = DeviceTrigger(state, heads, marks)
        self.tables = UnitTables(state, tokens)
        self.search = GpuUnitSearch(
            self._pairs, 1, shape.query_heads // heads, dim, index.gqa, index.kind, top_k, self.tables.room, self.tables.reps
        )
        """One search for each sequence and KV head."""
        self._resident = torch.zeros(b, dtype=torch.int64, device=device)
        self._lse = torch.zeros(b, shape.query_heads, dtype=torch.float32, device=device)
        self._log = QueryRing(state) if state.decode_window else None
        self._store_window()
        self._load()
        self._given_back = False

    @property
    def early(self) -> bool:
        return self.trigger.early

    def search_early(self) -> None:
        """The units are those that this step's search sees: only the end of a step changes them."""
        self._launch_search(self.trigger.before, self.trigger.always, self.state.scaling)

    def step(self, queries: Tensor, keys: Tensor, values: Tensor, parity: Tensor, params: AttentionParams) -> Tensor:
        queries, keys, values = queries.contiguous(), keys.contiguous(), values.contiguous()
        self.trigger.launch(queries)
        self._launch_search(queries, self.trigger.fire, params.scaling)
        total = None if self._log is None else self._lse
        out = self.attention.launch(queries, keys, values, self.search.ids, self.zone, parity, params, total)
        self.tables.end_step(queries, self._lse, self.attention, self.zone, self._marks, self._resident, self._log)
        return out

    def moved_on(self) -> None:
        self._steps += 1

    def renew(self) -> None:
        """Works on static sets that are soon due. What is long is done before the state is given back; after an error behind
        that, the next call goes on from there."""
        if not self._given_back:
            statics, every = self.state.statics, range(self.state.shape.sequences) if self._steps else ()
            soon = [(b, left) for b in every if (left := statics.due(b, self._steps)) is not None]
            if not soon:
                return
            with self.state.clock("static"):
                done = [statics.work(b, left, lambda b=b: self._look(b)) for b, left in soon]
            if not any(done):
                return
            self.finish()
        self._begin_static()
        self._load()
        self._given_back = False

    def begin_trial(self) -> None:
        self.zone[:, 6] = 1  # units that lose or win tokens could not be brought back

    def forget_trial(self) -> None:
        self.bad.zero_()
        self._load()

    def abandon(self) -> None:
        """As `finish`, after no step: static sets that were begun for it have not been used."""
        for b in range(self._begun):
            self.state.statics.grow_older(b, -1)
        self._begun, self._given_back = 0, True

    def finish(self) -> None:
        if self._given_back:
            return self.abandon()
        state, shape, sizes = self.state, self.state.shape, self._sizes
        rows = self.zone.view(shape.sequences, shape.kv_heads, -1)[:, 0].tolist()  # synchronises
        self.tables.give_back([row[4] for row in rows])
        moved, ids, counts = 0, *self._held()
        for b, (_, window, _, _, first, coming, _) in enumerate(rows):
            moved += first - self._first[b]
            window -= 1  # less the coming token
            at = self._front + places(first, window, self.attention.ring, shape.device)
            kept = self.attention.rows[b]
            state.store.resident.replace(b, 0, torch.cat([kept[:, : sizes.sink_tokens], kept[:, at]], 1))
            state.held[b] = Held(ids[b].clone(), counts[b].clone(), first)
            if state.marks_segments and state.segments is not None:
                new = self._marks[b, coming - self._steps : coming].nonzero().flatten().tolist()
                for number in new:
                    state.segments.mark(b, sizes.sink_tokens + coming - self._steps + number)
            if self._log is not None:
                self._log.give_back(b, self._steps, coming, sizes.sink_tokens)
        state.fetched = {}
        state.non_finite |= self.bad.bool()
        self._count(moved)
        for b in range(shape.sequences):
            state.statics.grow_older(b, self._steps - 1)
        self._steps, self._begun, self._given_back = 0, 0, True

    def _held(self) -> tuple[Tensor, Tensor]:
        """Ids `[B, H_kv, K]` and counts `[B, H_kv]` of the last searches, as views."""
        size = (self.state.shape.sequences, self.state.shape.kv_heads)
        return self.search.ids.view(*size, -1), self.search.counts.view(size)

    def _launch_search(self, queries: Tensor, fire: Tensor, scaling: float) -> None:
        self.search.launch(queries, self.tables.plan, fire.view(-1), scaling, self.search.top_k)

    def _begin_static(self) -> None:
        """What `LayerState.begin_step` does for the coming step, for the sequences for which it was not done."""
        while self._begun < self.state.shape.sequences:
            self.state.begin_static(self._begun)
            self._begun += 1

    def _look(self, b: int) -> StaticRefresh | None:
        """As `LayerState.begin_static` would see sequence b before the coming step; synchronises."""
        first, coming = self.zone.view(self.state.shape.sequences, self.state.shape.kv_heads, -1)[b, 0, 4:6].tolist()
        sink, keys = self._sizes.sink_tokens, self.attention.rows[b, :, :, 0]
        if self._log is not None:
            self._log.give_back(b, self._steps, coming, sink)
        window = keys[:, self._front + places(first, coming - first, self.attention.ring, keys.device)]
        return self.state.refresh(b, [(keys[:, :sink], 0), (window, sink + first)], first)

    def _load(self) -> None:
        """Takes over the state for the coming step; nothing of it is counted yet."""
        state, shape = self.state, self.state.shape
        self.attention.forget()
        self.tables.load([0 if s is None else s.ids.shape[1] for s in state.static])
        self._resident.zero_()
        self._marks.zero_()
        self._first, lines = [], []
        for b in range(shape.sequences):
            zones, kept = state.store.zones(b), self.attention.rows[b]
            resident, window = state.store.resident.view(b), zones.local + zones.buffer
            front = zones.sink
            kept[:, :front] = resident[:, :front]
            kept[:, self._front + places(zones.retrieval, window, self.attention.ring, shape.device)] = resident[:, front:]
            static = state.static[b]
            if static is not None:
                kept[:, front : front + static.rows.shape[1]] = static.rows
                front += static.rows.shape[1]
            coming = zones.retrieval + window
            oldest, newest = (number % self.attention.ring for number in (zones.retrieval, coming))
            lines += [[front, window + 1, oldest, self._front + newest, zones.retrieval, coming, 0]] * shape.kv_heads
            self._first.append(zones.retrieval)
            if state.segments is not None:
                starts = [p - zones.sink for p in state.segments.starts[b] if p - zones.sink >= zones.retrieval]
                self._marks[b, torch.tensor(starts, dtype=torch.int64, device=shape.device)] = 1
        self.zone.copy_(torch.tensor(lines, dtype=torch.int32))
        adopt_held(state, *self._held())
        self.trigger.adopt()

    def _store_window(self) -> None:
        """Every token of the window lies in its host row already, as later ones do from their own step on."""
        store = self.state.store
        for b, pool in enumerate(store.host):
            zones = store.zones(b)
            pool.write(zones.retrieval, store.resident.view(b, zones.sink).cpu())  # graphs wait for no copy

    def _count(self, moved: int) -> None:
        """Adds what the steps did to the counters."""
        state, steps, heads = self.state, self._steps, self.state.shape.kv_heads
        static = [0 if s is None else s.ids.shape[1] for s in state.static]
        read = int(self.attention.read.sum())
        sink = state.shape.sequences * self._sizes.sink_tokens * steps
        count_steps(
            state, steps, searches=self.trigger.give_back(steps), resident=int(self._resident.sum()) + sink,
            selected=sum(steps * heads * (state.top_k - s) for s in static), static=sum(steps * heads * s for s in static),
            read=read, moved=moved,
        )  # fmt: skip

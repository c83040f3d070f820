"""A layer of a captured decode that searches units: pages (PRKV, Quest, …) or clusters and segments (LouisKV)."""

# A launch takes what only Triton knows.
# pyright: reportCallIssue=false, reportIndexIssue=false, reportArgumentType=false

from __future__ import annotations

import torch
from torch import Tensor

from kvrecall.attend.step import StepAttention
from kvrecall.core.errors import CaptureError
from kvrecall.core.structs import AttentionParams, Held
from kvrecall.engine.captured.base import Group, SlotLayer, adopt_held, count_steps, keeps_rows
from kvrecall.engine.captured.trigger import DeviceTrigger, Marks
from kvrecall.engine.captured.unit_tables import UnitTables
from kvrecall.engine.captured.window import QueryRing, places
from kvrecall.engine.captured.zone_kernels import IDLE, TRIAL, ZONE_FIELDS
from kvrecall.index.unit_kernels.search import GpuUnitSearch
from kvrecall.index.units import UnitIndex
from kvrecall.layer.state import LayerState
from kvrecall.static.sets import StaticRefresh


class UnitLayer(SlotLayer):
    """Zones and segments live in device memory: where a segment ends depends on the queries, which the host never sees.

    The window is a ring: a token stays in its row until it leaves. The work for the next static set is done between steps, a
    share of it at a time; when the set is due, the ordinary state is given back, gets the set, and is taken over again.
    """

    def __init__(self, like: LayerState, slots: int, tokens: int, table: Tensor) -> None:
        """tokens: most tokens behind the sink. table: int32 `[slots, W]`, the blocks of each slot's sequence.

        like: a state whose static sets are chosen, as `begin` does. Raises CaptureError if they leave nothing to search."""
        super().__init__(like, slots)
        shape, sizes = self.shape, like.store.sizes
        index = like.index
        assert isinstance(index, UnitIndex)
        b, heads, dim, device = slots, shape.kv_heads, shape.head_dim, shape.device
        self._sizes, self._pairs, self._tokens, self._scaling = sizes, b * heads, tokens, like.scaling
        self._marks_segments = like.marks_segments
        chosen = _static_tokens(like)
        top_k = like.top_k - min(chosen)
        if top_k < 1:
            raise CaptureError("the static set is the whole budget", "Lower its share, or decode uncaptured.")
        undecided = like.static_config is not None and None in like.static
        self._front = sizes.sink_tokens + (like.top_k if undecided else max(chosen))
        ring = sizes.local_tokens + sizes.update_interval
        none = torch.empty(0, dtype=shape.dtype, device=device)
        host = like.store.on_host(table)
        self.attention = StepAttention(host, shape.query_heads, self._front, ring, top_k, keeps_rows(like, slots), none)
        self.bad = self.attention.bad
        self.zone = torch.zeros(self._pairs, ZONE_FIELDS.value, dtype=torch.int32, device=device)
        self._marks = torch.zeros(b, tokens + 1, dtype=torch.uint8, device=device)
        marks = Marks(self._marks, self.zone.view(b, heads, -1)[:, 0, 5]) if like.marks_segments else None
        self.trigger = DeviceTrigger(like, slots, heads, marks)
        self.tables = UnitTables(like, slots, tokens)
        self.search = GpuUnitSearch(
            self._pairs, 1, shape.query_heads // heads, dim, index.gqa, index.kind, top_k, self.tables.room, self.tables.reps
        )
        """One search for each slot and KV head."""
        self._resident = torch.zeros(b, dtype=torch.int64, device=device)
        self._lse = torch.zeros(b, shape.query_heads, dtype=torch.float32, device=device)
        self._log = QueryRing(like, slots) if like.decode_window else None
        self._away: set[Group] = set()  # given back for a new static set, and not taken over again
        for slot in range(slots):
            self._idle(slot)

    def fits(self, state: LayerState, room: int) -> bool:
        host = self.attention.table
        if (
            type(state.index) is not self.tables.kind
            or state.store.on_host(host.blocks).rows.data_ptr() != host.rows.data_ptr()
        ):
            return False
        assert isinstance(state.index, UnitIndex)
        chosen, zones = _static_tokens(state), [state.store.zones(b) for b in range(state.store.sequences)]
        undecided = state.static_config is not None and None in state.static
        return (
            self._sizes.sink_tokens + (state.top_k if undecided else max(chosen)) <= self._front
            and 1 <= state.top_k - min(chosen) <= self.search.top_k
            and max(z.total - z.sink for z in zones) + room < self._tokens
            and self.tables.holds(state.index, zones, room)
        )

    @property
    def early(self) -> bool:
        return self.trigger.early

    def search_early(self) -> None:
        """The units are those that this step's search sees: only the end of a step changes them."""
        self._launch_search(self.trigger.before, self.trigger.always, self._scaling)

    def step(self, queries: Tensor, keys: Tensor, values: Tensor, parity: Tensor, params: AttentionParams) -> Tensor:
        queries, keys, values = queries.contiguous(), keys.contiguous(), values.contiguous()
        self.trigger.launch(queries)
        self._launch_search(queries, self.trigger.fire, params.scaling)
        total = None if self._log is None else self._lse
        out = self.attention.launch(queries, keys, values, self.search.ids, self.zone, parity, params, total)
        self.tables.end_step(queries, self._lse, self.attention, self.zone, self._marks, self._resident, self._log)
        return out

    @property
    def ahead(self) -> bool:
        """A share of the work for static sets belongs to a step that is made."""
        return self.method.static_config() is None

    def renew(self) -> None:
        """Works on static sets that are soon due. What is long is done before a state is given back; after an error behind
        that, the next call goes on from there."""
        for group in self.groups:
            if group not in self._away:
                statics, every = group.state.statics, range(len(group.slots)) if group.steps else ()
                soon = [(b, left) for b in every if (left := statics.due(b, group.steps)) is not None]
                if not soon:
                    continue
                with group.state.clock("static"):
                    done = [statics.work(b, left, lambda b=b, group=group: self._look(group, b)) for b, left in soon]
                if not any(done):
                    continue
                self._give_back(group)
                self._away.add(group)
            group.begin_static()
            self._load(group)
            self._away.discard(group)

    def begin_trial(self) -> None:
        """Units that lose or win tokens could not be brought back."""
        for group in self.groups:
            self.zone.view(*self._by_slot, -1)[group.slots, :, 6] = TRIAL

    def _join(self, group: Group, room: int) -> None:
        state = group.state
        for b, pool in enumerate(state.store.host):
            # Every token of the window lies in its host row already, as later ones do from their own step on.
            zones = state.store.zones(b)
            pool.write(zones.retrieval, state.store.resident.view(b, zones.sink).cpu())  # graphs wait for no copy
        self._load(group)

    def _give_back(self, group: Group) -> None:
        state, shape, sizes = group.state, self.shape, self._sizes
        rows = self._of(group)[:, 0].tolist()  # synchronises
        self.tables.give_back(state, group.slots, [row[4] for row in rows])
        moved, ids, counts = 0, *self._held()
        for b, (slot, (_, window, _, _, first, coming, _)) in enumerate(zip(group.slots, rows, strict=True)):
            moved += first - group.first[b]
            window -= 1  # less the coming token
            at = self._front + places(first, window, self.attention.ring, shape.device)
            kept = self.attention.rows[slot]
            state.store.resident.replace(b, 0, torch.cat([kept[:, : sizes.sink_tokens], kept[:, at]], 1))
            state.held[b] = Held(ids[slot].clone(), counts[slot].clone(), first)
            if state.marks_segments and state.segments is not None:
                new = self._marks[slot, coming - group.steps : coming].nonzero().flatten().tolist()
                for number in new:
                    state.segments.mark(b, sizes.sink_tokens + coming - group.steps + number)
            if self._log is not None and state.log is not None:
                self._log.give_back(state.log, b, slot, group.steps, coming, sizes.sink_tokens)
        state.fetched = {}
        state.non_finite |= self.bad[group.slots].bool()
        self._count(group, moved)
        for b in range(len(group.slots)):
            state.statics.grow_older(b, group.steps - 1)
        group.steps = group.begun = 0

    def _forget(self, group: Group) -> None:
        self._away.discard(group)
        self.tables.release(group.state, group.slots)
        for slot in group.slots:
            self._idle(slot)

    def _idle(self, slot: int) -> None:
        """A slot without a sequence: its token attends to itself, and nothing is written down."""
        row = torch.tensor([0, 1, 0, self._front, 0, 0, IDLE], dtype=torch.int32)
        self.zone.view(*self._by_slot, -1)[slot] = row.to(self.zone.device)
        self.tables.plan.view(*self._by_slot, -1)[slot] = 0

    @property
    def _by_slot(self) -> tuple[int, int]:
        return self.shape.sequences, self.shape.kv_heads

    def _of(self, group: Group) -> Tensor:
        """The zone rows of a group: a copy where its slots are no range, so only to be read; `[b, H_kv, ZONE_FIELDS]`."""
        return self.zone.view(*self._by_slot, -1)[group.slots]

    def _held(self) -> tuple[Tensor, Tensor]:
        """Ids `[slots, H_kv, K]` and counts `[slots, H_kv]` of the last searches, as views."""
        return self.search.ids.view(*self._by_slot, -1), self.search.counts.view(self._by_slot)

    def _launch_search(self, queries: Tensor, fire: Tensor, scaling: float) -> None:
        self.search.launch(queries, self.tables.plan, fire.view(-1), scaling, self.search.top_k)

    def _look(self, group: Group, b: int) -> StaticRefresh | None:
        """As `LayerState.begin_static` would see sequence b before the coming step; synchronises."""
        state, slot = group.state, group.slots[b]
        first, coming = self._of(group)[b, 0, 4:6].tolist()
        sink, keys = self._sizes.sink_tokens, self.attention.rows[slot, :, :, 0]
        if self._log is not None and state.log is not None:
            self._log.give_back(state.log, b, slot, group.steps, coming, sink)
        window = keys[:, self._front + places(first, coming - first, self.attention.ring, keys.device)]
        return state.refresh(b, [(keys[:, :sink], 0), (window, sink + first)], first)

    def _load(self, group: Group) -> None:
        """Takes over the state for the coming step; nothing of it is counted yet."""
        state, shape = group.state, self.shape
        self.attention.forget(group.slots)
        self.tables.load(state, group.slots)
        self._scaling = state.scaling
        group.first = []
        for b, slot in enumerate(group.slots):
            self._resident[slot] = 0
            self.bad[slot] = 0
            self._marks[slot] = 0
            zones, kept = state.store.zones(b), self.attention.rows[slot]
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
            row = torch.tensor([front, window + 1, oldest, self._front + newest, zones.retrieval, coming, 0], dtype=torch.int32)
            self.zone.view(*self._by_slot, -1)[slot] = row.to(self.zone.device)
            group.first.append(zones.retrieval)
            if state.segments is not None:
                starts = [p - zones.sink for p in state.segments.starts[b] if p - zones.sink >= zones.retrieval]
                self._marks[slot, torch.tensor(starts, dtype=torch.int64, device=shape.device)] = 1
        adopt_held(group, *self._held())
        self.trigger.join(group)

    def _count(self, group: Group, moved: int) -> None:
        """Adds what the steps did to the counters."""
        state, steps, slots, heads = group.state, group.steps, group.slots, self.shape.kv_heads
        static = _static_tokens(state)
        sink = len(slots) * self._sizes.sink_tokens * steps
        count_steps(
            state, steps, searches=self.trigger.give_back(group), resident=int(self._resident[slots].sum()) + sink,
            selected=sum(steps * heads * (state.top_k - s) for s in static), static=sum(steps * heads * s for s in static),
            read=int(self.attention.read[slots].sum()), moved=moved,
        )  # fmt: skip


def _static_tokens(state: LayerState) -> list[int]:
    """Tokens of each sequence's static set."""
    return [0 if s is None else s.ids.shape[1] for s in state.static]

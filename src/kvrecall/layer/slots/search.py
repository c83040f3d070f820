"""A layer of a device step that searches: the part that all indexes share. Each index adds its own (`IndexStep`)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from kvrecall.attend.step import StepAttention
from kvrecall.cache.slot_zones import DeviceZones, PlannedZones, SlotZones, ZonePlan
from kvrecall.cache.zones import ZoneLengths
from kvrecall.core.errors import CaptureError
from kvrecall.core.structs import AttentionParams, HeldSelection
from kvrecall.index.step import SlotSpec, SlotStep
from kvrecall.layer.slots.base import SlotAssignment, SlotLayer, rows_kept
from kvrecall.layer.state import LayerState
from kvrecall.select.queries import QueryRing, places
from kvrecall.static.sets import StaticRefresh
from kvrecall.trigger import Speculative
from kvrecall.trigger.device import DeviceTrigger, Marks


class SearchSlots(SlotLayer):
    """Rows of the windows, trigger, zones and static sets of all slots. The index's part (`IndexStep`) searches them.

    The window of a slot is a ring: a token stays in its row until it leaves, and nothing is shifted. The work for the next
    static set runs beside the steps, a share of it at a time; when the set is due, the ordinary state is given back, gets the
    set, and is taken over again.
    """

    def __init__(
        self, like: LayerState, slots: int, tokens: int, table: Tensor, plan: ZonePlan | None = None,
        rows: Sequence[Tensor] = (), width: int = 1, times: int = 0,
    ) -> None:  # fmt: skip
        """tokens: most tokens after the sink. table: int32 `[slots, W]`, the blocks of each slot's sequence. plan, rows: of
        the zones, and the device's copies of its rows, one for each token of a step; none if the device counts. width: tokens
        of a step. times: rows in the row cache (`rows_kept`).

        like: a state whose static sets are chosen (`begin`). Raises CaptureError if they leave nothing to search, and for
        parts that cannot take back tokens of a step.
        """
        super().__init__(like, slots)
        shape, sizes, index = self.shape, like.store.sizes, like.index
        assert index is not None
        heads, dim, device = shape.kv_heads, shape.head_dim, shape.device
        self._sizes, self._tokens, self._scaling = sizes, tokens, like.scaling
        chosen = _static_tokens(like)
        top_k = like.top_k - min(chosen)
        if top_k < 1:
            raise CaptureError("the static set is the whole budget", "Lower its share, or decode uncaptured.")
        if width > 1:
            _check_several(like, plan, width)
        front, ring = sizes.sink_tokens + _room_for_static(like), sizes.local_tokens + sizes.update_interval + width - 1
        host, none = like.store.on_host(table), torch.empty(0, dtype=shape.dtype, device=device)
        trigger = like.method.trigger_config()
        self.zones: SlotZones
        marks = None
        if plan is not None:
            self.zones = PlannedZones(plan, rows[0])
        else:
            self.zones = zones = DeviceZones(slots, heads, sizes, tokens, front, ring, device, like.segments is None)
            marks = Marks(zones.marks, zones.token_numbers) if like.marks_segments and like.segments is not None else None
        longest = 0 if like.segments is None else like.segments.longest
        self.early, every_step = isinstance(trigger, Speculative), trigger.name == "every-step"
        self.part = part = index.slot_step(SlotSpec(shape, sizes, tokens, top_k, host, plan, self.early, every_step, longest))
        """The index's part."""
        self.attention = StepAttention(
            host, shape.query_heads, front, ring, top_k, rows_kept(like, times), none, part.estimated_parts, part.spread
        )
        self.bad = self.attention.bad
        self._zones_of = [self.zones, *(PlannedZones(plan, own) for own in rows[1:] if plan is not None)]
        """The zones as each token of a step sees them."""
        self._found = [(torch.zeros_like(part.ids), torch.zeros_like(part.counts)) for _ in range(width if width > 1 else 0)]
        self._last = 0
        """The selection of each token of the last step, and which of them was taken last."""
        self.trigger = DeviceTrigger(trigger, like.layer, slots, shape.query_heads, dim, part.width, none, marks)
        group = shape.query_heads // heads
        self._lse = torch.zeros(slots, shape.query_heads, dtype=torch.float32, device=device)
        self._log = QueryRing(slots, heads, like.decode_window, group, dim, none) if like.decode_window else None
        self._estimated: dict[int, int] = {}  # groups of tokens whose attention was estimated, by slot
        self._away: set[SlotAssignment] = set()  # given back for a new static set, not yet taken over again

    def fits(self, state: LayerState, room: int) -> bool:
        host, index = self.attention.table, state.index
        if index is None or state.store.on_host(host.blocks).rows.data_ptr() != host.rows.data_ptr():
            return False
        chosen, zones = _static_tokens(state), [state.store.zones(b) for b in range(state.store.sequences)]
        return (
            self._sizes.sink_tokens + _room_for_static(state) <= self.attention.front
            and 1 <= state.top_k - min(chosen) <= self.attention.top_k
            and max(z.total - z.sink for z in zones) + room < self._tokens
            and self.part.fits(index, zones, room)
        )

    def search_early(self) -> None:
        """Sees the same zones as this step's search: only the end of a step changes them."""
        self.part.search_early(self.trigger.before, self.trigger.always, self.zones, self._scaling)

    def _step(self, queries: Tensor, keys: Tensor, values: Tensor, now: Tensor, params: AttentionParams, before: int) -> Tensor:
        self.trigger.launch(queries)
        out = self.part.step(self.step_inputs(queries, keys, values, now, params, before))
        if self._found:
            ids, counts = self._found[before]
            ids.copy_(self.part.ids)
            counts.copy_(self.part.counts)
        return out

    def step_inputs(
        self, queries: Tensor, keys: Tensor, values: Tensor, now: Tensor, params: AttentionParams, before: int = 0
    ) -> SlotStep:
        """The inputs of the index's part for a token with `before` others before it in the step; all contiguous."""
        zones = self._zones_of[before]
        return SlotStep(queries, keys, values, params, now, self.trigger.fire, zones, self.attention, self._log, self._lse)

    def settle(self, taken: int, fed: int) -> None:
        """Rows of tokens that were not taken lie in the ring beyond the window, where later tokens are written."""
        if taken:
            self._last = taken - 1

    def renew(self) -> None:
        """Renews static sets, and lets the index's part take in the tokens by which a zone has grown.

        The long work comes before a state is given back. After an error later than that, the next call continues there. The
        host waits for the GPU only if the GPU counts: zones whose tokens leave by segments, or searches.
        """
        for group in self.groups:
            if group.state.static_config is not None:
                self._renew_static(group)
            elif isinstance(self.zones, PlannedZones):
                self._catch_up(group, self.zones)

    def _renew_static(self, group: SlotAssignment) -> None:
        if group not in self._away:
            statics, every = group.state.statics, range(len(group.slots)) if group.steps else ()
            soon = [(b, left) for b in every if (left := statics.due(b, group.steps)) is not None]
            if not soon:
                return
            with group.state.clock("static"):
                done = [statics.work(b, left, lambda b=b: self._look(group, b)) for b, left in soon]
            if not any(done):
                return
            self._give_back(group)
            self._away.add(group)
        group.begin_static()
        self._take_over(group, 0)
        self._away.discard(group)

    def _catch_up(self, group: SlotAssignment, zones: PlannedZones) -> None:
        for b, (slot, own) in enumerate(zip(group.slots, zones.lengths(group.slots), strict=True)):
            if self.part.lacks(slot, own.retrieval):
                pool = group.state.store.host[b]
                before = pool.length
                pool.extend(own.retrieval)  # with the tokens that captured steps stored
                try:
                    self.part.catch_up(slot, own.retrieval)
                finally:
                    pool.extend(before)  # the store is updated when the sequence leaves

    def begin_trial(self) -> None:
        for group in self.groups:
            self.zones.begin_trial(group.slots)

    def moved_on(self) -> None:
        super().moved_on()
        for group in self.groups:
            self.zones.moved_on(group.slots)
            for slot in group.slots:
                self._estimated[slot] += self.part.estimated(slot)

    def _join(self, group: SlotAssignment, room: int) -> None:
        for b in range(len(group.slots)):
            zones, rows = group.state.store.zones(b), group.state.store.resident.view(b)
            window = rows[:, zones.sink : zones.sink + self.zones.on_host(zones)]
            group.state.store.host[b].write(zones.retrieval, window.cpu())  # synchronous: graphs wait for no copy
        self._take_over(group, room)

    def _take_over(self, group: SlotAssignment, room: int) -> None:
        """Takes over the state for the coming step; nothing of it is counted yet. The window is in the host's rows."""
        state, index, attention = group.state, group.state.index, self.attention
        assert index is not None
        self._scaling, group.first = state.scaling, []
        attention.forget(group.slots)
        for b, slot in enumerate(group.slots):
            zones, rows = state.store.zones(b), state.store.resident.view(b)
            front, window = self._fill(slot, state, b, zones), rows[:, zones.sink :]
            self.part.join(slot, index, b, zones, state.store.as_stored(window), state.top_k - state.statics.tokens(b), room)
            self.zones.join(slot, zones, front)
            self.bad[slot].zero_()  # to assign a number is a copy that waits
            self._estimated[slot] = 0
            group.first.append(zones.retrieval)
            if isinstance(self.zones, DeviceZones) and state.segments is not None:
                starts = [p - zones.sink for p in state.segments.starts[b]]
                self.zones.mark(slot, [number for number in starts if number >= zones.retrieval])
        ids, counts = self.part.ids, self.part.counts
        for b, held in state.held.items():  # the selections of the steps before
            slot, width = group.slots[b], min(held.ids.shape[1], ids.shape[2])
            ids[slot] = -1
            ids[slot, :, :width] = held.ids[:, :width]
            counts[slot] = held.counts
        self.trigger.join(state.trigger, group.slots, state.held)

    def _fill(self, slot: int, state: LayerState, b: int, zones: ZoneLengths) -> int:
        """Copies the rows of a sequence that every step attends to; a window token's row follows from its number.

        Returns how many rows lie in front of the window.
        """
        kept, rows, static, front = self.attention.rows[slot], state.store.resident.view(b), state.static[b], zones.sink
        kept[:, :front] = rows[:, :front]
        kept[:, self._window(zones)] = rows[:, front:]
        if static is not None:
            kept[:, front : front + static.rows.shape[1]] = static.rows
            front += static.rows.shape[1]
        return front

    def _window(self, zones: ZoneLengths) -> Tensor:
        """The rows that hold the window of a sequence, oldest first."""
        attention = self.attention
        return attention.front + places(zones.retrieval, zones.local + zones.buffer, attention.ring, self.shape.device)

    def _give_back(self, group: SlotAssignment) -> None:
        state, index, sink = group.state, group.state.index, self._sizes.sink_tokens
        assert index is not None
        after = self.zones.lengths(group.slots)
        for b, (slot, zones) in enumerate(zip(group.slots, after, strict=True)):
            pool, kept = state.store.host[b], self.attention.rows[slot]
            start, tokens = min(pool.length, index.lengths[b]), zones.retrieval  # less than the rows after an error
            pool.extend(tokens)
            self.part.leave(slot, index, b, tokens, partial(pool.keys, start, tokens, self.shape.device))
            state.store.resident.replace(b, 0, torch.cat([kept[:, : zones.sink], kept[:, self._window(zones)]], 1))
            ids, counts = self._found[self._last] if self._found else (self.part.ids, self.part.counts)
            state.held[b] = HeldSelection(ids[slot].clone(), counts[slot].clone(), tokens)
            coming = zones.total - zones.sink
            if isinstance(self.zones, DeviceZones) and state.segments is not None and state.marks_segments:
                for number in self.zones.marked(slot, coming - group.steps, coming):
                    state.segments.mark(b, sink + number)
            if self._log is not None and state.log is not None:
                self._log.give_back(state.log, b, slot, group.steps, coming, sink)
        state.fetched = {}
        state.non_finite |= torch.stack([self.bad[slot] for slot in group.slots]).bool()  # a list would be sent to the GPU
        self._count(group, sum(zones.retrieval for zones in after) - sum(group.first))
        if state.static_config is not None:
            for b in range(len(group.slots)):
                state.statics.grow_older(b, group.steps - 1)
        group.steps = group.begun = 0

    def _forget(self, group: SlotAssignment) -> None:
        self._away.discard(group)
        index = group.state.index
        assert index is not None
        for b, slot in enumerate(group.slots):
            self.part.forget(slot, index, b)
            self.zones.leave(slot)
            self._estimated.pop(slot, None)

    def _look(self, group: SlotAssignment, b: int) -> StaticRefresh | None:
        """A new static set of sequence b, begun as `LayerState.begin_static` would before the coming step."""
        state, slot = group.state, group.slots[b]
        zones = self.zones.lengths([slot])[0]
        sink, keys = self._sizes.sink_tokens, self.attention.rows[slot, :, :, 0]
        if self._log is not None and state.log is not None:
            self._log.give_back(state.log, b, slot, group.steps, zones.total - zones.sink, sink)
        window = keys[:, self._window(zones)]
        return state.refresh(b, [(keys[:, :sink], 0), (window, sink + zones.retrieval)], zones.retrieval)

    def _count(self, group: SlotAssignment, moved: int) -> None:
        """Adds what the steps did to the counters."""
        state, steps, slots, heads = group.state, group.steps, group.slots, self.shape.kv_heads
        static, read = _static_tokens(state), torch.stack([self.attention.read[slot] for slot in slots]).sum()
        state.counters.captured(
            steps, len(slots), heads, searches=self.trigger.give_back(state.trigger, slots, steps),
            resident=self.zones.attended(slots, steps), selected=sum(steps * heads * (state.top_k - s) for s in static),
            static=sum(steps * heads * s for s in static), read=read, moved=moved,
            estimated=sum(self._estimated[slot] for slot in slots),
        )  # fmt: skip


def _check_several(state: LayerState, plan: ZonePlan | None, width: int) -> None:
    """Raises CaptureError for a layer that cannot take back tokens of a step. Without trigger, static set and counts of sign
    patterns, everything follows from lengths, which the host counts."""
    index = state.method.index_config()
    why = {
        f"index {getattr(index, 'name', None)!r} counts its zones on the device": plan is None,
        f"trigger {state.method.trigger_config().name!r} remembers queries": state.method.trigger_config().name != "every-step",
        "static sets remember queries": state.static_config is not None,
        "collisions count the keys of a sequence": getattr(index, "stage1", None) == "collision",
        f"a window of {state.store.sizes.local_tokens} tokens": state.store.sizes.local_tokens < width,
    }
    for reason, refused in why.items():
        if refused:
            remedy = "Decode uncaptured (capture=None), or feed one token at a time."
            raise CaptureError(f"a step of {width} tokens with layer {state.layer}: {reason}", remedy)


def _static_tokens(state: LayerState) -> list[int]:
    """Tokens of each sequence's static set."""
    return [state.statics.tokens(b) for b in range(len(state.static))]


def _room_for_static(state: LayerState) -> int:
    """Most tokens that a static set of a state's sequences may have."""
    undecided = state.static_config is not None and None in state.static
    return state.top_k if undecided else max(_static_tokens(state))

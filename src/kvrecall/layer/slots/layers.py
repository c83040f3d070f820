"""All layers of a device step, each of the kind that its state needs, and the plans that the host gives them."""

from __future__ import annotations

import torch
from torch import Tensor

from kvrecall.cache.slot_zones import ZonePlan
from kvrecall.core.cuda import staging
from kvrecall.core.launch import cdiv
from kvrecall.layer.slots.base import SlotAssignment, SlotLayer, cache_times, kind_of, require_pinned
from kvrecall.layer.slots.dense import DenseSlots
from kvrecall.layer.slots.search import SearchSlots
from kvrecall.layer.state import LayerState

_ALIGNED = 4
"""int32 numbers of 16 bytes: kernels are compiled once for addresses that are multiples of these."""


class SlotLease:
    """The sequences of one cache in their slots, layer by layer, and how many steps they may still make."""

    def __init__(self, states: list[LayerState], numbers: list[int], room: int) -> None:
        """Ends the prompts of the states and begins their static sets, as the next step would. numbers: of the slots, one per
        sequence. `Layers.leave` takes back what was not used.
        """
        self.states, self.numbers, self.room = states, numbers, room
        self.groups = [SlotAssignment(state, numbers) for state in states]
        for group in self.groups:
            group.state.last_steps.forget()
            group.state.end_prompts(list(range(len(numbers))), coming=1)
        for group in self.groups:
            group.begin_static()

    @property
    def behind_sink(self) -> int:
        """The most tokens after the sink that a sequence may reach."""
        zones = [state.store.zones(b) for state in self.states for b in range(len(self.numbers))]
        return max(z.total - z.sink for z in zones) + self.room + 1

    def undo(self) -> None:
        """Takes back what was begun for the first step of sequences that did not join."""
        for group in self.groups:
            if not group.steps:
                group.end_static()


class Layers:
    """All layers, in order. Layers of one method share a plan; those whose zones live on the device need none."""

    def __init__(self, like: list[LayerState], slots: int, tokens: int, width: int = 1) -> None:
        """like: states of the kind that is to join, with their static sets chosen. tokens: most tokens after the sink. width:
        tokens of a step; if there are several, `advance` tells how many were taken.

        Raises CaptureError if a layer refuses; the states are then unchanged.
        """
        self.slots, self.tokens, self.width, self._pool = slots, tokens, width, like[0].store.pool
        device = like[0].shape.device
        self.table = torch.zeros(slots, cdiv(tokens, self._pool.block_size), dtype=torch.int32, device=device)
        """int32 `[slots, W]`: the blocks of each slot's sequence, the same in all layers."""
        self.plans: list[ZonePlan] = []
        self._numbers = [self._plan_of(state) for state in like]
        """The number of each layer's plan; None if it has none."""
        sizes = [slots * plan.row for plan in self.plans]
        self._rows = torch.zeros(width, _ALIGNED * cdiv(sum(sizes), _ALIGNED), dtype=torch.int32, device=device)
        """The rows of all plans for the next step, for each of its tokens."""
        each = [own[: sum(sizes)].split(sizes) for own in self._rows]
        rows = list(zip(*([part.view(slots, -1) for part in parts] for parts in each), strict=True))
        self.all: list[SlotLayer] = []
        times = cache_times(like, slots)
        for state, number in zip(like, self._numbers, strict=True):
            if state.index is None:
                self.all.append(DenseSlots(state, slots, tokens, self.table))
            else:
                plan, own = (None, ()) if number is None else (self.plans[number], rows[number])
                self.all.append(SearchSlots(state, slots, tokens, self.table, plan, own, width, times))
        self._prepared = False

    def fits(self, lease: SlotLease) -> bool:
        """Whether sequences can join: they have the memory, kinds and sizes that the launches were made for."""
        return (
            lease.states[0].store.pool is self._pool
            and len(lease.states) == len(self.all)
            and lease.behind_sink <= self.tokens
            and all(
                layer.kind == kind_of(state) and layer.memory is state.store.memory and layer.fits(state, lease.room)
                for layer, state in zip(self.all, lease.states, strict=True)
            )
        )

    def join(self, lease: SlotLease) -> None:
        """Puts sequences that fit into free slots. After an error the states are unchanged; `lease` may be used again."""
        self._prepared = False
        # Layers share the blocks of a sequence: all are final before the table is filled.
        for state in lease.states:
            for b, rows in enumerate(state.store.host):
                zones = state.store.zones(b)
                rows.ensure_blocks(zones.total - zones.sink + lease.room + 1, every_layer=True)
            if state.index is not None:
                require_pinned(state)  # also the room that was reserved just now
        for b, slot in enumerate(lease.numbers):
            blocks = lease.states[0].store.host[b].block_table.on(self.table.device)
            self.table[slot, : len(blocks)] = blocks[: self.table.shape[1]]
        for number, plan in enumerate(self.plans):
            state = lease.states[self._numbers.index(number)]  # of a layer that follows it
            for b, slot in enumerate(lease.numbers):
                plan.zones[slot] = state.store.zones(b)
        try:
            for layer, group in zip(self.all, lease.groups, strict=True):
                layer.join(group, lease.room)
        except BaseException:
            self._free(lease)
            raise

    def leave(self, lease: SlotLease) -> None:
        """Gives all states back, even if one fails, and frees the slots. Raises the first error."""
        errors: list[BaseException] = []
        for layer, group in zip(self.all, lease.groups, strict=True):
            try:
                made = group.steps
                layer.leave(group)
                if not made:
                    group.end_static()
            except BaseException as error:
                errors.append(error)
        self._free(lease)
        if errors:
            raise errors[0]

    def prepare(self, trial: bool = False) -> None:
        """Before a step: writes its plans and does what is due only every few steps. Does nothing after `prepare_ahead`."""
        prepared, self._prepared = self._prepared, False
        if prepared and not trial:
            return
        for layer in self.all:
            if trial:
                layer.begin_trial()
            else:
                layer.renew()
        if self.plans:
            rows = torch.zeros(self._rows.shape, dtype=torch.int32, device="cpu")
            for t, own in enumerate(rows):
                numbers = torch.cat([plan.rows(trial, t).view(-1) for plan in self.plans])
                own[: len(numbers)] = numbers
            if self._rows.is_cuda:  # from pinned memory the copy is asynchronous; the step before may still run
                rows = staging(tuple(rows.shape), rows.dtype).copy_(rows)
            self._rows.copy_(rows, non_blocking=True)

    def prepare_ahead(self) -> None:
        """Prepares the next step while the last one runs."""
        try:
            self.prepare()
            self._prepared = True
        except Exception:  # `prepare` tries again at the next step and raises there
            self._prepared = False

    def advance(self, taken: int = 1) -> None:
        """After a step, of whose tokens the first `taken` were taken, at most `most_taken`."""
        for _ in range(taken):
            for layer in self.all:
                layer.moved_on()
            for plan in self.plans:
                plan.advance()
        for layer in self.all:
            layer.settle(taken, self.width)

    def most_taken(self, slots: list[int]) -> int:
        """How many tokens of the next step can be taken: a zone may grow with the last of them only."""
        return min([self.width, *(plan.until_growth(slot) for plan in self.plans for slot in slots)])

    def forget_trial(self) -> None:
        """Undoes a step that was a trial."""
        self._prepared = False
        for layer in self.all:
            layer.forget_trial()

    def bad(self) -> Tensor:
        """int32 `[layers, slots]`, not 0 where a key or value was not finite."""
        return torch.stack([layer.bad for layer in self.all])

    def _free(self, lease: SlotLease) -> None:
        self._prepared = False
        for layer, group in zip(self.all, lease.groups, strict=True):
            layer.leave(group)  # does nothing where the group has left or never joined
        for plan in self.plans:
            for slot in lease.numbers:
                plan.zones.pop(slot, None)
        for slot in lease.numbers:
            self.table[slot] = 0

    def _plan_of(self, state: LayerState) -> int | None:
        """The number of a layer's plan, made here if no earlier layer shares it; None if the device plans."""
        made = None if state.index is None else state.index.slot_plan(state.method.zone_sizes(), state.top_k, self.slots)
        if made is None:
            return None
        made.spare = self.width - 1
        if made not in self.plans:
            self.plans.append(made)
        return self.plans.index(made)

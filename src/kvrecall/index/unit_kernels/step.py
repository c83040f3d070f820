"""The part of a device step of an index over units: units of every slot at fixed addresses, with room for those to come."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from kvrecall.cache.slot_zones import SlotZones
from kvrecall.cache.zones import ZoneLengths
from kvrecall.index.base import Index
from kvrecall.index.step import IndexStep, SlotSpec
from kvrecall.index.unit_kernels.search import FIELDS, GpuUnitSearch, plan_row
from kvrecall.index.units import Units

if TYPE_CHECKING:
    from kvrecall.index.clusters import ClusterIndex
    from kvrecall.index.pages import PageIndex


class UnitStep(IndexStep):
    """Units of all slots: reps `[slots, H_kv, room, R]`, members int32 `[slots, H_kv, tokens]`, offsets int32 `[slots, H_kv,
    room + 1]`, and one row of a search's plan for each slot and KV head, int64 `[slots * H_kv, FIELDS]`.

    The device counts the zones: where a segment ends depends on the queries, which the host never sees. A subclass says how
    units grow when tokens leave the window.
    """

    def __init__(self, index: PageIndex | ClusterIndex, spec: SlotSpec, room: int) -> None:
        """index: of the kind that is to join. room: most units of a sequence."""
        super().__init__(spec)
        self.room, self._kind = room, type(index)
        b, heads, shape, device = spec.slots, spec.shape.kv_heads, spec.shape, spec.shape.device
        self.width = self._heads = heads
        width = index.units(0).reps.shape[2]
        self.reps = torch.zeros(b, heads, room, width, dtype=shape.dtype, device=device)
        self._members = torch.zeros(b, heads, spec.tokens, dtype=torch.int32, device=device)
        self._offsets = torch.zeros(b, heads, room + 1, dtype=torch.int32, device=device)
        self.plan = torch.zeros(b * heads, FIELDS, dtype=torch.int64, device=device)
        self.searches = GpuUnitSearch(
            b * heads, 1, spec.group, shape.head_dim, index.gqa, index.kind, spec.top_k, room, self.reps
        )
        """One search for each slot and KV head."""
        self.ids, self.counts = self.searches.ids.view(b, heads, -1), self.searches.counts.view(b, heads)

    def fits(self, index: Index, zones: list[ZoneLengths], room: int) -> bool:
        return type(index) is self._kind

    def join(self, slot: int, index: Index, sequence: int, zones: ZoneLengths, window: Tensor, budget: int, room: int) -> None:
        """The units of the sequence lie in the slot's memory from then on, and its index refers to that."""
        known = cast("PageIndex | ClusterIndex", index)
        units = known.units(sequence)
        own = self._of(slot, units.reps.shape[1], units.members.shape[1])
        for to, of in zip((own.reps, own.members, own.offsets), (units.reps, units.members, units.offsets), strict=True):
            to.copy_(of)
        known.move(sequence, own)
        every = (slice(h, h + 1) for h in range(self._heads))
        rows = [plan_row(own.reps[head], own.members[head], own.offsets[head], budget) for head in every]
        self.plan.view(-1, self._heads, FIELDS)[slot] = torch.tensor(rows, dtype=torch.int64).to(self.plan.device)

    def search(self, queries: Tensor, fire: Tensor, zones: SlotZones, scaling: float) -> None:
        self.searches.launch(queries, self.plan, fire.view(-1), scaling, self.spec.top_k)

    def forget(self, slot: int, index: Index, sequence: int) -> None:
        """Gives the index of the sequence memory of its own again."""
        known = cast("PageIndex | ClusterIndex", index)
        units = known.units(sequence)
        if units.reps.untyped_storage().data_ptr() == self.reps.untyped_storage().data_ptr():
            known.move(sequence, Units(units.reps.clone(), units.members.clone(), units.offsets.clone()))
        self.plan.view(-1, self._heads, FIELDS)[slot] = 0

    @property
    def tables(self) -> tuple[Tensor, ...]:
        """What the kernels that end a step write to."""
        return self.plan, self.reps, self._members, self._offsets

    def _of(self, slot: int, count: int, members: int) -> Units:
        """The first units of a slot, as views."""
        return Units(self.reps[slot, :, :count], self._members[slot, :, :members], self._offsets[slot, :, : count + 1])

"""Units in a device step: each slot's units lie in memory of its sequence, with room for more."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from kvrecall.cache.slot_zones import SlotZones
from kvrecall.cache.zones import ZoneLengths
from kvrecall.core.cuda import to_device
from kvrecall.core.structs import lasting_tensors
from kvrecall.index.base import Index
from kvrecall.index.step import IndexStep, SlotSpec
from kvrecall.index.units import GrowingUnits, UnitIndex, Units
from kvrecall.index.units.plan import FIELDS, plan_row


@dataclass(frozen=True)
class UnitTable:
    """Memory of the units of one sequence while it is in a slot. It is used for one stay only, so references to its units stay
    valid.

    reps: `[H_kv, C, R]`, members: int32 `[H_kv, n]`, offsets: int32 `[H_kv, C + 1]`, scores: fp32 `[H_kv, lanes, C or more]`.
    units: the index's units that it was filled with. limit: tokens after the sink that it has room for.
    """

    reps: Tensor
    members: Tensor
    offsets: Tensor
    scores: Tensor
    units: Units
    limit: int

    @property
    def nbytes(self) -> int:
        return self.reps.nbytes + self.members.nbytes + self.offsets.nbytes + self.scores.nbytes

    def rows(self, budget: int) -> list[list[int]]:
        """One row of a plan per KV head, for the units that the table was filled with."""
        counts = self.units.reps.shape[1], self.units.members.shape[1]
        heads = (slice(h, h + 1) for h in range(len(self.reps)))  # an empty view would have no address
        rows = (plan_row(self.reps[h], self.members[h], self.offsets[h], self.scores[h], budget) for h in heads)
        return [[*counts, *row[2:]] for row in rows]


class UnitStep(IndexStep):
    """Units of all slots, and one row of a search's plan for each slot and KV head, int64 `[slots * H_kv, FIELDS]`.

    Kernels find a slot's units by the addresses in its rows. So each slot has memory of its own size, for its units and for the
    steps to come, and a graph holds only the plan's address.

    The device counts the zones, because the end of a segment depends on queries that the host never sees. A subclass defines
    how units grow when tokens leave the window.
    """

    def __init__(self, index: UnitIndex, spec: SlotSpec, room: int) -> None:
        """index: any index of the kind that will join. room: most units of a sequence."""
        from kvrecall.index.units.search import GpuUnitSearch  # needs Triton

        super().__init__(spec)
        self.room, self._kind = room, type(index)
        b, heads, shape, device = spec.slots, spec.shape.kv_heads, spec.shape, spec.shape.device
        self.width = self._heads = heads
        self.tables: dict[int, UnitTable] = {}
        """By slot; keeps the memory alive whose addresses are in the plan."""
        self.plan = torch.zeros(b * heads, FIELDS, dtype=torch.int64, device=device)
        self.searches = GpuUnitSearch(
            b * heads, 1, spec.group, shape.head_dim, index.gqa, index.kind, spec.top_k, room, shape.dtype, device,
            own_scores=True,
        )  # fmt: skip
        """The search over all slots and KV heads; scratch for `room` units each, besides the scores: at most three numbers
        per unit."""
        self.ids, self.counts = self.searches.ids.view(b, heads, -1), self.searches.counts.view(b, heads)

    @abstractmethod
    def most_units(self, units: Units, tokens: int, steps: int) -> int:
        """The most units of a sequence after `tokens` more tokens in `steps` steps."""

    def lent(self, units: Units, table: Units) -> Units:
        """The units that a sequence's index uses while they are in a table. Here: the table's, for steps that only append."""
        return table

    def fits(self, index: Index, zones: list[ZoneLengths], room: int) -> bool:
        return type(index) is self._kind

    def join(self, slot: int, index: Index, sequence: int, zones: ZoneLengths, window: Tensor, budget: int, room: int) -> None:
        """Copies the sequence's units to a table with room for more, and makes its index use the table. Copies nothing if
        they are in the slot's table already."""
        unit_index = cast("UnitIndex", index)
        units, table, behind = unit_index.units(sequence), self.tables.get(slot), zones.total - zones.sink
        limit = max(behind + room + 1, 0 if table is None else table.limit)  # joining again keeps the room of the first time
        if table is None or table.units is not units or table.limit < limit:
            table = self._filled(units, limit - zones.retrieval, limit - behind, limit)
            unit_index.move(sequence, table.units)
        (rows,) = to_device(self.plan.device, torch.tensor(table.rows(budget), dtype=torch.int64, device="cpu"))
        self.plan.view(-1, self._heads, FIELDS)[slot] = rows
        self.tables[slot] = table  # the plan no longer refers to the previous table

    def search(self, queries: Tensor, fire: Tensor, zones: SlotZones, scaling: float) -> None:
        self.searches.launch(queries, self.plan, fire.view(-1), scaling, self.spec.top_k)

    def forget(self, slot: int, index: Index, sequence: int) -> None:
        """No step writes to the table any more. References to its units stay valid."""
        unit_index, table = cast("UnitIndex", index), self.tables.pop(slot, None)
        self.plan.view(-1, self._heads, FIELDS)[slot] = 0
        if table is not None and isinstance(table.units, GrowingUnits) and unit_index.units(sequence) is table.units:
            unit_index.move(sequence, table.units.settled())

    def _filled(self, units: Units, tokens: int, steps: int, limit: int) -> UnitTable:
        """A table with these units, and room for `tokens` more tokens in `steps` steps."""
        heads, count, width = units.reps.shape
        count_tokens, most = units.members.shape[1], self.most_units(units, tokens, steps)
        shape = self.spec.shape
        with lasting_tensors():
            reps = torch.empty(heads, most, width, dtype=shape.dtype, device=shape.device)
            members = torch.empty(heads, count_tokens + tokens, dtype=torch.int32, device=shape.device)
            offsets = torch.empty(heads, most + 1, dtype=torch.int32, device=shape.device)
            scores = self.searches.scores_for(heads, most)
        there = Units(reps[:, :count], members[:, :count_tokens], offsets[:, : count + 1])
        for to, of in zip((there.reps, there.members, there.offsets), (units.reps, units.members, units.offsets), strict=True):
            to.copy_(of)
        return UnitTable(reps, members, offsets, scores, self.lent(units, there), limit)

"""The part of a device step of an index over units: each slot has units in memory of its own sequence, with room for more."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from kvrecall.cache.slot_zones import SlotZones
from kvrecall.cache.zones import ZoneLengths
from kvrecall.core.structs import lasting_tensors
from kvrecall.index.base import Index
from kvrecall.index.step import IndexStep, SlotSpec
from kvrecall.index.unit_kernels.search import FIELDS, GpuUnitSearch, plan_row
from kvrecall.index.units import GrowingUnits, Units

if TYPE_CHECKING:
    from kvrecall.index.clusters import ClusterIndex
    from kvrecall.index.pages import PageIndex


@dataclass(frozen=True)
class UnitTable:
    """Memory of the units of one sequence while it is in a slot. It serves one stay and is never filled anew, so whoever has
    seen its units may keep them.

    reps: `[H_kv, C, R]`, members: int32 `[H_kv, n]`, offsets: int32 `[H_kv, C + 1]`, scores: fp32 `[H_kv, lanes, C or more]`.
    units: those it was filled with, as the index knows them. limit: tokens behind the sink that it has room for.
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
        """One row of a plan for each KV head, which has the units that the table was filled with."""
        counts = self.units.reps.shape[1], self.units.members.shape[1]
        heads = (slice(h, h + 1) for h in range(len(self.reps)))  # an empty view would have no address
        rows = (plan_row(self.reps[h], self.members[h], self.offsets[h], self.scores[h], budget) for h in heads)
        return [[*counts, *row[2:]] for row in rows]


class UnitStep(IndexStep):
    """Units of all slots, and one row of a search's plan for each slot and KV head, int64 `[slots * H_kv, FIELDS]`.

    Kernels find a slot's units by the addresses in its rows. So the memory of a slot is that of its own sequence, sized by its
    own units and by the steps that it may make, and a graph holds no address but the plan's.

    The device counts the zones: where a segment ends depends on the queries, which the host never sees. A subclass says how
    units grow when tokens leave the window.
    """

    def __init__(self, index: PageIndex | ClusterIndex, spec: SlotSpec, room: int) -> None:
        """index: of the kind that is to join. room: most units of a sequence."""
        super().__init__(spec)
        self.room, self._kind = room, type(index)
        b, heads, shape, device = spec.slots, spec.shape.kv_heads, spec.shape, spec.shape.device
        self.width = self._heads = heads
        self.tables: dict[int, UnitTable] = {}
        """By slot; held so that the addresses in the plan stay what they are."""
        self.plan = torch.zeros(b * heads, FIELDS, dtype=torch.int64, device=device)
        like = torch.empty(1, dtype=shape.dtype, device=device)
        self.searches = GpuUnitSearch(
            b * heads, 1, spec.group, shape.head_dim, index.gqa, index.kind, spec.top_k, room, like, own_scores=True
        )
        """One search for each slot and KV head, with scratch for `room` units of each beside the scores: less than
        one number per unit."""
        self.ids, self.counts = self.searches.ids.view(b, heads, -1), self.searches.counts.view(b, heads)

    @abstractmethod
    def most_units(self, units: Units, tokens: int, steps: int) -> int:
        """How many units of a sequence there may be after so many further tokens and steps."""

    def lent(self, units: Units, table: Units) -> Units:
        """What the index of a sequence refers to while its `units` are in a table: the same ones there. Here for steps that
        write behind them only."""
        return table

    def fits(self, index: Index, zones: list[ZoneLengths], room: int) -> bool:
        return type(index) is self._kind

    def join(self, slot: int, index: Index, sequence: int, zones: ZoneLengths, window: Tensor, budget: int, room: int) -> None:
        """The units of the sequence are copied to a table with room for those to come, and its index refers to that. Where
        they lie in the slot's table already, nothing is copied."""
        known = cast("PageIndex | ClusterIndex", index)
        units, table, behind = known.units(sequence), self.tables.get(slot), zones.total - zones.sink
        limit = max(behind + room + 1, 0 if table is None else table.limit)  # again: room for the steps of the first time
        if table is None or table.units is not units or table.limit < limit:
            table = self._filled(units, limit - zones.retrieval, limit - behind, limit)
            known.move(sequence, table.units)
        rows = torch.tensor(table.rows(budget), dtype=torch.int64)
        self.plan.view(-1, self._heads, FIELDS)[slot] = rows.to(self.plan.device)
        self.tables[slot] = table  # which gives up the one before, of which the plan knows no longer

    def search(self, queries: Tensor, fire: Tensor, zones: SlotZones, scaling: float) -> None:
        self.searches.launch(queries, self.plan, fire.view(-1), scaling, self.spec.top_k)

    def forget(self, slot: int, index: Index, sequence: int) -> None:
        """The table is left to whoever refers to its units; no step writes there any more."""
        known, table = cast("PageIndex | ClusterIndex", index), self.tables.pop(slot, None)
        self.plan.view(-1, self._heads, FIELDS)[slot] = 0
        if table is not None and isinstance(table.units, GrowingUnits) and known.units(sequence) is table.units:
            known.move(sequence, table.units.settled())

    def _filled(self, units: Units, tokens: int, steps: int, limit: int) -> UnitTable:
        """A table with units, and room for so many further tokens and steps."""
        heads, count, width = units.reps.shape
        held, most = units.members.shape[1], self.most_units(units, tokens, steps)
        shape = self.spec.shape
        with lasting_tensors():
            reps = torch.empty(heads, most, width, dtype=shape.dtype, device=shape.device)
            members = torch.empty(heads, held + tokens, dtype=torch.int32, device=shape.device)
            offsets = torch.empty(heads, most + 1, dtype=torch.int32, device=shape.device)
            scores = self.searches.scores_for(heads, most)
        there = Units(reps[:, :count], members[:, :held], offsets[:, : count + 1])
        for to, of in zip((there.reps, there.members, there.offsets), (units.reps, units.members, units.offsets), strict=True):
            to.copy_(of)
        return UnitTable(reps, members, offsets, scores, self.lent(units, there), limit)

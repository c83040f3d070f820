"""Segments' part of a device step: the oldest segment of a full window becomes a unit (LouisKV section 4.2)."""

# Kernel launches take arguments that type checkers do not know.
# pyright: reportCallIssue=false, reportIndexIssue=false, reportArgumentType=false

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING, cast

from torch import Tensor

from kvrecall.cache.slot_zones import DeviceZones
from kvrecall.cache.zones import ZoneLengths
from kvrecall.core.launch import next_power_of_2
from kvrecall.index.base import Index
from kvrecall.index.clusters.kernels import segment_kernel
from kvrecall.index.step import SlotSpec, SlotStep, end_arguments
from kvrecall.index.unit_kernels.search import FIELDS
from kvrecall.index.unit_kernels.step import UnitStep
from kvrecall.index.units import Units

if TYPE_CHECKING:
    from kvrecall.index.clusters import ClusterIndex

_TOKENS = 16
"""Tokens of a segment that are read at once."""


class SegmentStep(UnitStep):
    """Clusters of prompts and segments of generated tokens, of all slots. A step adds at most one segment."""

    def __init__(self, index: ClusterIndex, spec: SlotSpec) -> None:
        most = max(index.units(b).reps.shape[1] + spec.tokens - length for b, length in enumerate(index.lengths))
        super().__init__(index, spec, most)

    def fits(self, index: Index, zones: list[ZoneLengths], room: int) -> bool:
        if not super().fits(index, zones, room):
            return False
        known = cast("ClusterIndex", index)
        return max(self.most_units(known.units(b), 0, room + 1) for b in range(len(zones))) <= self.room

    def most_units(self, units: Units, tokens: int, steps: int) -> int:
        return units.reps.shape[1] + steps

    def end(self, asked: SlotStep) -> None:
        assert isinstance(asked.zones, DeviceZones)
        args, sizes = end_arguments(self.spec, asked)
        marks, longest = asked.zones.marks, self.spec.longest_segment
        segment_kernel[(len(self.plan),)](
            *args.begin, self.plan, marks, *args.logs, *args.numbers, longest, marks.shape[1], args.window,
            BM=next_power_of_2(longest), T=_TOKENS, FIELDS=FIELDS, **sizes,
        )  # fmt: skip

    def leave(self, slot: int, index: Index, sequence: int, tokens: int, keys: Callable[[], Tensor]) -> None:
        if tokens == index.lengths[sequence]:
            return
        count, table = int(self.plan.view(self.spec.slots, -1, FIELDS)[slot, 0, 0]), self.tables[slot]
        ends = table.offsets[0, table.units.reps.shape[1] : count + 1].tolist()
        cast("ClusterIndex", index).append_segments(sequence, keys(), [end - begin for begin, end in pairwise(ends)])

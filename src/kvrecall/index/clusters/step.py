"""Segments' part of a device step: the oldest segment of a full window becomes a unit (LouisKV section 4.2)."""

# A launch takes what only Triton knows.
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

if TYPE_CHECKING:
    from kvrecall.index.clusters import ClusterIndex

_TOKENS = 16
"""Tokens of a segment that are read at once."""


class SegmentStep(UnitStep):
    """Clusters of prompts and segments of what was generated, of all slots. A step adds one segment at most."""

    def __init__(self, index: ClusterIndex, spec: SlotSpec) -> None:
        most = max(index.units(b).reps.shape[1] + spec.tokens - length for b, length in enumerate(index.lengths))
        super().__init__(index, spec, most)
        self._before: dict[int, int] = {}

    def fits(self, index: Index, zones: list[ZoneLengths], room: int) -> bool:
        if not super().fits(index, zones, room):
            return False
        known = cast("ClusterIndex", index)
        return max(known.units(b).reps.shape[1] + z.local + z.buffer for b, z in enumerate(zones)) + room <= self.room

    def join(self, slot: int, index: Index, sequence: int, zones: ZoneLengths, window: Tensor, budget: int, room: int) -> None:
        super().join(slot, index, sequence, zones, window, budget, room)
        self._before[slot] = cast("ClusterIndex", index).units(sequence).reps.shape[1]

    def end(self, asked: SlotStep) -> None:
        assert isinstance(asked.zones, DeviceZones)
        args, sizes = end_arguments(self.spec, asked)
        marks, longest = asked.zones.marks, self.spec.longest_segment
        segment_kernel[(len(self.plan),)](
            *args.begin, *self.tables, marks, *args.logs, *args.numbers, longest, self.room, self.spec.tokens, marks.shape[1],
            args.window, BM=next_power_of_2(longest), T=_TOKENS, FIELDS=FIELDS, **sizes,
        )  # fmt: skip

    def leave(self, slot: int, index: Index, sequence: int, tokens: int, keys: Callable[[], Tensor]) -> None:
        if tokens == index.lengths[sequence]:
            return
        count = int(self.plan.view(self.spec.slots, -1, FIELDS)[slot, 0, 0])
        ends = self._offsets[slot, 0, self._before[slot] : count + 1].tolist()
        cast("ClusterIndex", index).append_segments(sequence, keys(), [end - begin for begin, end in pairwise(ends)])

    def forget(self, slot: int, index: Index, sequence: int) -> None:
        super().forget(slot, index, sequence)
        self._before.pop(slot, None)

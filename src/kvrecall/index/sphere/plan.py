"""The plan of a device step over sphere codes: one row of int32 numbers per slot, from the host, for all layers."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvrecall.cache.slot_zones import ZonePlan
from kvrecall.cache.zones import ZoneLengths, ZoneSizes
from kvrecall.index.sphere.kernels.search import FIELDS as SEARCH_FIELDS
from kvrecall.index.sphere.kernels.search import plan_row
from kvrecall.index.sphere.schedule import RatioStep, StageSizes, most_candidates, stage_sizes

ZONE_FIELDS = 7
"""Numbers of a zone row, in this order:

sink rows · window rows · ring place of the oldest window row · row of the new token · row of the token that is encoded now
(-1: none) · its id in the retrieval zone · whether the zone grows with this step.
"""

ROW = SEARCH_FIELDS + ZONE_FIELDS
"""Numbers per slot: of the search, then of the zones."""


@dataclass
class StepPlan(ZonePlan):
    """Zone lengths of the sequences in their slots, step by step; `rows` is the plan of the next step."""

    sizes: ZoneSizes
    schedule: tuple[RatioStep, ...]
    min_candidates_per_k: int
    top_k: int
    slots: int
    zones: dict[int, ZoneLengths] = field(default_factory=dict, compare=False)
    spare: int = 0
    """Tokens of a step beyond its first, which may come to the window before it moves."""

    row = ROW

    @property
    def ring(self) -> int:
        """Length of the window ring: the most window rows at a time."""
        return self.sizes.local_tokens + self.sizes.update_interval + self.spare

    def stage(self, tokens: int) -> StageSizes:
        """Sizes of a search over `tokens` tokens."""
        return stage_sizes(self.schedule, tokens, self.top_k, self.min_candidates_per_k)

    def most_candidates(self, tokens: int) -> int:
        """Most candidates that any zone of up to `tokens` tokens has."""
        return most_candidates(self.schedule, tokens, self.top_k, self.min_candidates_per_k)

    def rows(self, quiet: bool = False, ahead: int = 0) -> Tensor:
        """int32 `[slots, ROW]` on the CPU, for the next step. quiet: for a trial run, which encodes nothing. ahead: for a token
        with so many before it in the step."""
        rows = [self._row(self.zones.get(slot), quiet, ahead) for slot in range(self.slots)]
        return torch.tensor(rows, dtype=torch.int32, device="cpu")

    def until_growth(self, slot: int) -> int:
        zones = self.zones[slot]
        return max(1, self.sizes.local_tokens + self.sizes.update_interval - zones.local - zones.buffer)

    def advance(self) -> None:
        """After a step: every sequence has one more token, and a full buffer moves to the retrieval zone."""
        for slot, zones in self.zones.items():
            _, self.zones[slot] = self.sizes.step(zones)

    def attended(self, slot: int) -> int:
        """Tokens outside the retrieval zone that the next step attends to, its own included."""
        return self.sizes.step(self.zones[slot])[0].resident

    def _row(self, zones: ZoneLengths | None, quiet: bool, ahead: int) -> list[int]:
        sink = self.sizes.sink_tokens
        if zones is None:  # an empty slot: its token attends to itself, finds nothing and is not stored
            return [*plan_row(0, self.stage(0)), 0, 1, 0, sink, -1, -1, 0]
        window = zones.local + zones.buffer + 1 + ahead
        buffer = max(0, window - self.sizes.local_tokens)
        newest = zones.retrieval + window - 1  # position after the sink
        leaving = zones.retrieval + buffer - 1 if buffer and not quiet else -1
        row = sink + leaving % self.ring if leaving >= 0 else -1
        grows = not ahead and self.sizes.step(zones)[1].retrieval > zones.retrieval and not quiet
        search = plan_row(zones.retrieval, self.stage(zones.retrieval))
        return [*search, zones.sink, window, zones.retrieval % self.ring, sink + newest % self.ring, row, leaving, int(grows)]

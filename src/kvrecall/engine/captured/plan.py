"""What the host tells the kernels of a captured step: one row of int32 numbers per sequence, the same for every layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvrecall.cache.zones import ZoneLengths, ZoneSizes
from kvrecall.index.sphere.kernels.search import FIELDS as SEARCH_FIELDS
from kvrecall.index.sphere.kernels.search import plan_row
from kvrecall.index.sphere.schedule import RatioStep, StageSizes, stage_sizes

ZONE_FIELDS = 7
"""Numbers of a zone row, in this order:

sink rows · window rows · ring place of the oldest window row · row of the new token · row of the token that is encoded now
(-1: none) · its id in the retrieval zone · whether the zone grows with this step.
"""

ROW = SEARCH_FIELDS + ZONE_FIELDS
"""Numbers per sequence: those of the search, then those of the zones."""


@dataclass
class StepPlan:
    """Zone lengths of all sequences, step by step; `rows` says what the next step is to do."""

    sizes: ZoneSizes
    schedule: tuple[RatioStep, ...]
    min_candidates_per_k: int
    top_k: int
    zones: list[ZoneLengths]
    """As they are before the next step."""
    steps: int = 0
    resident_tokens: int = 0
    """Resident tokens attended so far, over all sequences and steps."""

    @property
    def ring(self) -> int:
        """Places for window rows: never more are needed at once."""
        return self.sizes.local_tokens + self.sizes.update_interval

    def stage(self, tokens: int) -> StageSizes:
        """Sizes of a search over so many tokens."""
        return stage_sizes(self.schedule, tokens, self.top_k, self.min_candidates_per_k)

    def most_candidates(self, tokens: int) -> int:
        """Most candidates that any zone between now and `tokens` tokens has."""
        edges = [s.below_tokens - 1 for s in self.schedule if s.below_tokens is not None and s.below_tokens <= tokens]
        return max(self.stage(n).candidates for n in [*edges, *(z.retrieval for z in self.zones), tokens])

    def rows(self, quiet: bool = False) -> tuple[list[list[int]], list[list[int]]]:
        """(search rows, zone rows) of the next step. quiet: for a trial run, which encodes nothing."""
        search, zone = [], []
        for zones in self.zones:
            window = zones.local + zones.buffer + 1
            buffer = max(0, window - self.sizes.local_tokens)
            newest = zones.retrieval + window - 1  # ordinal behind the sink
            sink = self.sizes.sink_tokens
            leaving = zones.retrieval + buffer - 1 if buffer and not quiet else -1
            row = sink + leaving % self.ring if leaving >= 0 else -1
            grows = self._after(zones)[1] > 0 and not quiet
            search.append(plan_row(zones.retrieval, self.stage(zones.retrieval)))
            place = zones.retrieval % self.ring
            zone.append([zones.sink, window, place, sink + newest % self.ring, row, leaving, int(grows)])
        return search, zone

    def advance(self) -> None:
        """The step was made: every sequence has one token more, and a full buffer moves to the retrieval zone."""
        self.steps += 1
        for b, zones in enumerate(self.zones):
            after, moved = self._after(zones)
            self.resident_tokens += after.resident
            self.zones[b] = self.sizes.lengths(after.total, after.retrieval + moved)

    def _after(self, zones: ZoneLengths) -> tuple[ZoneLengths, int]:
        """Zones with one more token, and how many then move to the retrieval zone."""
        after = self.sizes.lengths(zones.total + 1, zones.retrieval)
        return after, self.sizes.evicted(after, settle=False)


def pack(rows: tuple[list[list[int]], list[list[int]]]) -> Tensor:
    """Both kinds of rows side by side, int32 `[B, ROW]` on the CPU."""
    return torch.tensor([a + b for a, b in zip(*rows, strict=True)], dtype=torch.int32)

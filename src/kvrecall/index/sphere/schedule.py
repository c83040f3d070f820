"""How many keys collide and how many become candidates, by length of the retrieval zone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from kvrecall.core.errors import ParameterError


@dataclass(frozen=True)
class RatioStep:
    """Ratios for retrieval zones of fewer than `below_tokens` tokens (None: no upper end).

    candidate_ratio: beta, share of the zone that is reranked. collision_ratio: rho, share of the keys that score in a subspace.
    """

    below_tokens: int | None
    candidate_ratio: float
    collision_ratio: float

    def __post_init__(self) -> None:
        for name in ("candidate_ratio", "collision_ratio"):
            value = getattr(self, name)
            if not 0 < value <= 1:
                raise ParameterError(name, "a ratio in (0, 1]", value, "It is a share of the keys.")


PAPER_SCHEDULE = (
    RatioStep(5_000, 0.50, 0.50),
    RatioStep(10_000, 0.25, 0.30),
    RatioStep(30_000, 0.20, 0.25),
    RatioStep(None, 0.10, 0.20),
)
"""The table in the paper's published code (the paper itself gives only "beta = 5%-10%, rho >= beta")."""
BALANCED_SCHEDULE = (
    RatioStep(10_000, 0.20, 0.20),
    RatioStep(20_000, 0.10, 0.20),
    RatioStep(40_000, 0.06, 0.20),
    RatioStep(100_000, 0.04, 0.20),
    RatioStep(200_000, 0.03, 0.20),
    RatioStep(400_000, 0.02, 0.20),
    RatioStep(None, 0.015, 0.20),
)
"""For balanced keys, whose one-bit products rank better than collisions, so that fewer candidates are enough.

The number of candidates that catch 0.002 less attention than 10 % of the keys grows more slowly than the zone: 360 to 510 at 8K
tokens, 620 to 1,030 at 16K, 1,330 at 32K (top_k 100, Qwen2.5-Coder-0.5B, `benchmarks/results/recall_beta.csv`). The steps
below 40,000 tokens are measured and have a margin. The later ones are extrapolated: the number grows by about a half per
doubling, as from 16K to 32K. Products do not use the collision ratio."""


@dataclass(frozen=True)
class StageSizes:
    """Sizes of one search over n tokens: `candidates` reranked, `tier_targets` keys covered by each collision tier."""

    candidates: int
    tier_targets: tuple[int, ...]


TIER_PERCENTILES = (0.05, 0.15, 0.30, 0.50, 0.75, 1.00)
"""Nested tiers inside the top-rho keys (Appendix B.2.1): a centroid's bonus is the number of tiers that contain it, 0..6."""


def as_steps(given: Iterable[RatioStep | Sequence]) -> tuple[RatioStep, ...]:
    """Steps from records, or from lists as in files and on the command line."""
    return tuple(step if isinstance(step, RatioStep) else RatioStep(*step) for step in given)


def check_schedule(schedule: tuple[RatioStep, ...]) -> None:
    """Raises ParameterError unless lengths ascend and the last step is open-ended."""
    ends = [step.below_tokens for step in schedule]
    ascending = all(a is not None and b is not None and a < b for a, b in pairwise(ends[:-1]))
    if not ends or ends[-1] is not None or None in ends[:-1] or not ascending:
        raise ParameterError("schedule", "steps with ascending below_tokens and None in the last", ends, "See PAPER_SCHEDULE.")


def stage_sizes(schedule: tuple[RatioStep, ...], tokens: int, top_k: int, min_candidates_per_k: int) -> StageSizes:
    """Sizes for a retrieval zone of `tokens` tokens; never fewer candidates than min(tokens, min_candidates_per_k * top_k)."""
    step = next(s for s in schedule if s.below_tokens is None or tokens < s.below_tokens)
    candidates = max(math.ceil(tokens * step.candidate_ratio), min_candidates_per_k * top_k, top_k)
    covered = tokens * step.collision_ratio
    return StageSizes(min(tokens, candidates), tuple(math.ceil(covered * p) for p in TIER_PERCENTILES))


def most_candidates(schedule: tuple[RatioStep, ...], tokens: int, top_k: int, min_candidates_per_k: int) -> int:
    """Most candidates that any zone of up to `tokens` tokens has."""
    edges = [step.below_tokens - 1 for step in schedule if step.below_tokens is not None and step.below_tokens <= tokens]
    return max(stage_sizes(schedule, n, top_k, min_candidates_per_k).candidates for n in [*edges, tokens])

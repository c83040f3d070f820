"""Confidence intervals of mean scores, and pass@k."""

from __future__ import annotations

from math import comb, sqrt
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from kvrecall.core.errors import ParameterError

LEVEL = 0.95
RESAMPLES = 10_000


class Interval(NamedTuple):
    """A mean in [0, 1] with its 95% interval; low and high are None for fewer than two samples.

    kind: "wilson" or "bootstrap"; "" without an interval.
    """

    mean: float
    low: float | None
    high: float | None
    kind: str


def interval(scores: list[float]) -> Interval:
    """Wilson's score interval if every score is 0 or 1; otherwise the percentiles of 10,000 bootstrap means, from a fixed seed.

    If all scores are equal, the bootstrap interval is the mean itself.
    """
    if not scores:
        raise ParameterError("scores", "one score or more", scores, "There is nothing to average.")
    mean = float(np.mean(scores))
    if len(scores) < 2:
        return Interval(mean, None, None, "")
    if set(scores) <= {0, 1}:
        return Interval(mean, *wilson(mean, len(scores)), "wilson")
    drawn = np.random.default_rng(0).choice(np.asarray(scores, dtype=np.float64), (RESAMPLES, len(scores)))
    low, high = np.quantile(drawn.mean(1), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(mean, float(low), float(high), "bootstrap")


def wilson(share: float, count: int) -> tuple[float, float]:
    """Wilson's score interval of a share of `count` trials, at 95%."""
    z = NormalDist().inv_cdf((1 + LEVEL) / 2)
    centre = share + z * z / (2 * count)
    spread = z * sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    scale = 1 + z * z / count
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)


def pass_at_k(attempts: int, right: int, k: int) -> float:
    """Unbiased estimate of the chance that one of k attempts is right, from `right` of `attempts` (Chen et al. 2021, eq. 1)."""
    if not 0 <= right <= attempts or not 1 <= k <= attempts:
        expected = f"k in [1, attempts] and right in [0, attempts], with {attempts} attempts"
        raise ParameterError("k", expected, f"k = {k}, right = {right}", "Make at least k attempts per problem.")
    return 1.0 - comb(attempts - right, k) / comb(attempts, k)

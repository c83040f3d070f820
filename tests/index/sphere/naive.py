"""Collision scoring as Appendix B.2.1 of the paper words it, in plain Python: the oracle of the oracle."""

from __future__ import annotations

import math
from collections.abc import Sequence

TIERS = (0.05, 0.15, 0.30, 0.50, 0.75, 1.00)


def centroid_of(block: Sequence[float]) -> int:
    """Id of the sign pattern of 8 coordinates."""
    return sum(1 << j for j, x in enumerate(block) if x >= 0)


def bonus_table(query_block: Sequence[float], members: dict[int, int], tokens: int, ratio: float) -> dict[int, int]:
    """Bonus of every centroid: in how many tiers it is. members: keys per centroid."""
    proxy = {c: sum(x if c >> j & 1 else -x for j, x in enumerate(query_block)) for c in range(256)}
    better, bonus = 0, {}
    for centroid in sorted(proxy, key=lambda c: (-proxy[c], c)):
        bonus[centroid] = sum(better < math.ceil(tokens * ratio * tier) for tier in TIERS)
        better += members.get(centroid, 0)
    return bonus


def coarse_scores(query: Sequence[float], keys: Sequence[Sequence[float]], ratio: float) -> list[int]:
    """Sum over blocks of the bonus of each key's centroid. query, keys: rotated."""
    totals = [0] * len(keys)
    for start in range(0, len(query), 8):
        ids = [centroid_of(key[start : start + 8]) for key in keys]
        members = {c: ids.count(c) for c in set(ids)}
        bonus = bonus_table(query[start : start + 8], members, len(keys), ratio)
        totals = [total + bonus[c] for total, c in zip(totals, ids, strict=True)]
    return totals


def best(scores: Sequence[float], count: int) -> list[int]:
    """Positions of the largest scores, ties to the lower position, ascending."""
    return sorted(sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:count])

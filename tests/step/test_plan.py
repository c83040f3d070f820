"""How many tokens a GPU reranks, by the length of the zone, is what the schedule says."""

from __future__ import annotations

import pytest

from kvrecall.index.sphere.config import SphereConfig
from kvrecall.index.sphere.schedule import as_steps, stage_sizes

SHORT = [[100, 0.7, 0.5], [1000, 0.31, 0.3], [None, 0.013, 0.2]]


@pytest.mark.parametrize("longest", [1, 99, 100, 40_000])
@pytest.mark.parametrize(
    ("config", "top_k"), [(SphereConfig(), 100), (SphereConfig(schedule=SHORT, min_candidates_per_k=2), 7)]
)
def test_candidates_of_every_length(config: SphereConfig, top_k: int, longest: int) -> None:
    told, steps = config.paged_candidates(longest, top_k), as_steps(config.schedule)
    least = config.min_candidates_per_k
    assert told.tolist() == [stage_sizes(steps, n, top_k, least).candidates for n in range(longest + 1)]

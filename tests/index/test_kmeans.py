"""k-means of keys: against plain Python, and what it must find."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from kvrecall.index.units.clusters import cluster
from tests.strategies import SEEDS, examples, gaussian


def naive_cluster(keys: list[list[float]], clusters: int, iterations: int) -> list[int]:
    """Spherical k-means with centring of one head, in plain Python."""

    def unit(x: list[float]) -> list[float]:
        length = math.sqrt(sum(a * a for a in x))
        return [a / length for a in x] if length > 1e-12 else x

    def nearest(x: list[float]) -> int:
        cosines = [sum(a * b for a, b in zip(x, c, strict=True)) for c in centres]
        return cosines.index(max(cosines))

    count = len(keys)
    mean = [sum(column) / count for column in zip(*keys, strict=True)]
    points = [unit([a - m for a, m in zip(key, mean, strict=True)]) for key in keys]
    centres = [points[c * count // clusters] for c in range(clusters)]
    assigned = [nearest(p) for p in points]
    for _ in range(iterations):
        for c in range(clusters):
            own = [p for p, a in zip(points, assigned, strict=True) if a == c]
            if own:
                centres[c] = unit([sum(column) for column in zip(*own, strict=True)])
        assigned = [nearest(p) for p in points]
    return assigned


@examples(40)
@given(seed=SEEDS, count=st.integers(1, 40), mean=st.integers(1, 8), iterations=st.integers(1, 5))
def test_kmeans_equals_plain_python(seed: int, count: int, mean: int, iterations: int) -> None:
    keys, clusters = gaussian(seed, 2, count, 5), -(-count // mean)
    assigned = cluster(keys, clusters, iterations)
    assert assigned.tolist() == [naive_cluster(head.tolist(), clusters, iterations) for head in keys]
    assert torch.equal(assigned, cluster(keys.clone(), clusters, iterations))


def test_heads_are_clustered_alone() -> None:
    keys = gaussian(3, 3, 40, 5)
    assert torch.equal(cluster(keys, 6, 10), torch.cat([cluster(keys[h : h + 1], 6, 10) for h in range(3)]))


def test_separated_blobs_are_found_beneath_what_all_keys_share() -> None:
    blob = torch.tensor([(i + i // 10) % 4 for i in range(40)])  # the evenly spaced beginnings lie in different blobs
    shared = 100 * torch.ones(6)  # without centring, every cosine would be about 1
    keys = torch.eye(6)[blob] + shared + 0.05 * gaussian(1, 1, 40, 6)
    assigned = cluster(keys, 4, 10)[0]
    assert {tuple(assigned[blob == b].unique().tolist()) for b in range(4)} == {
        (c,) for c in assigned[[0, 10, 20, 30]].tolist()
    }
    assert sorted(assigned.unique().tolist()) == [0, 1, 2, 3]


def test_equal_keys_join_the_first_cluster() -> None:
    assert not cluster(gaussian(2, 1, 1, 5).expand(1, 20, 5), 5, 10).any()

"""RetroInfer: what it attends to, what it estimates, and the attention that follows, against loops."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from kvrecall import methods
from kvrecall.baselines.retroinfer import EstimatingIndex
from kvrecall.core.errors import CompositionError, ParameterError
from kvrecall.index.units.clusters import cluster
from kvrecall.methods import Method
from tests.baselines.course import Course, shared, weighted
from tests.baselines.small import small
from tests.one_layer import ZONES, dense


def clusters_of(course: Course, prompt: int, arrivals: list[tuple[int, int]]) -> list[list[list[int]]]:
    """Members of the clusters per KV head: stretches of 32 of the prompt, then each arrival by itself."""
    pieces = [(i, min(i + 32, prompt)) for i in range(0, prompt, 32)] + arrivals
    found: list[list[list[int]]] = [[], []]
    for start, stop in pieces:
        count = -(-(stop - start) // 4)
        keys = course.keys[:, course.sink + start : course.sink + stop]
        assigned = cluster(keys, count, 10)  # k-means itself is tested elsewhere
        for h in range(2):
            found[h] += [[start + i for i in range(stop - start) if assigned[h, i] == c] for c in range(count)]
    return found


@pytest.mark.parametrize(("ratio", "dim"), [(0.232, 64), (0.0, 64), (1.0, 80)])
def test_retroinfer_attends_estimates_and_leaves_out(ratio: float, dim: int) -> None:
    course, arrivals = Course(small("retroinfer", top_k=10, estimated_ratio=ratio), dim=dim), []
    for _ in range(20):
        before = course.zone
        out = course.step()
        if before and course.zone > before:
            arrivals.append((before, course.zone))
        units, wanted, expected = clusters_of(course, 70, arrivals), [], []
        for h in range(2):
            keys, values = course.zone_keys()[h], course.values[h, course.sink :][: course.zone].double()
            full = [u for u in units[h] if u]
            means = torch.stack([keys[u].mean(0).float().double() for u in full])
            ranked = shared(course.query(h) @ means.T, "mean_softmax", dim**-0.5)
            order = sorted(range(len(full)), key=lambda i: (-ranked[i], i))
            exact: list[int] = []
            for at in order:
                exact += full[at][: 10 - len(exact)]
            free = [at for at in order if not set(full[at]) & set(exact)][: math.ceil(ratio * len(units[h]))]
            wanted.append(sorted(exact))
            terms = [(keys[i], values[i], 0.0) for i in exact]
            terms += [(means[at], values[full[at]].mean(0), math.log(len(full[at]))) for at in free]
            expected += [weighted(course, 3 * h + g, terms) for g in range(3)]
        assert course.found() == wanted
        torch.testing.assert_close(out, torch.stack(expected), atol=2e-5, rtol=1e-4)
    assert len(arrivals) == 2 and (course.state.stats.estimated_units > 0) == (ratio > 0)


def test_estimation_brings_the_output_nearer_to_full_attention() -> None:
    errors = []
    for ratio in (0.0, 1.0):
        course = Course(small("retroinfer", top_k=10, estimated_ratio=ratio), length=300)
        out = course.step()
        full = dense(course.queries[:, -1], course.keys, course.values)
        errors.append(float((out - full).norm()))
    assert errors[1] < errors[0]


def test_estimates_follow_crops_and_copies() -> None:
    index = "estimating-clusters:cluster_tokens=4,stretch_tokens=32"
    course = Course(Method(index=index, top_k=10, trigger="fixed-stride:steps=3", **ZONES))
    for _ in range(4):
        course.step()
    state = course.state
    assert isinstance(state.index, EstimatingIndex)
    twin, values = state.index.select([0, 0]), state.index.values(0).clone()
    state.crop(0, 60)
    fresh = state.method.build_index(state.shape)
    assert isinstance(fresh, EstimatingIndex)
    fresh.bind(state.store.host)
    fresh.append(0, course.keys[:, 4:44])
    assert torch.equal(state.index.values(0), fresh.values(0)) and torch.equal(twin.values(1), values)
    assert fresh.values(0).shape[1] < values.shape[1]


def test_a_static_set_is_refused() -> None:
    with pytest.raises(CompositionError, match="count static tokens twice"):
        methods.get("retroinfer", static="observation-window")


@pytest.mark.parametrize(("changes", "says"), [
    ({"estimated_ratio": 1.5}, "estimated_ratio: expected a share"),
    ({"cluster_tokens": 0}, "cluster_tokens"),
])  # fmt: skip
def test_impossible_parameters(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ParameterError, match=says):
        methods.get("retroinfer", **changes)

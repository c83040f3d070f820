"""MagicPIG and RetroInfer: what they select, how they weigh it, and the attention that follows, against loops."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from kvrecall import methods
from kvrecall.baselines.magicpig.index import sampling_probability
from kvrecall.baselines.retroinfer.index import EstimatingIndex
from kvrecall.core.errors import CompositionError, ParameterError
from kvrecall.index.clusters.kmeans import cluster
from kvrecall.index.hashing import hyperplanes
from kvrecall.methods import Method
from tests.baselines.small import Course, shared, small
from tests.one_layer import ZONES, dense


def weighted(course: Course, head: int, terms: list[tuple[Tensor, Tensor, float]]) -> Tensor:
    """Attention `[D]` of a query head over what is resident and over terms of (key, value, logarithm of the weight)."""
    total, h = course.keys.shape[1], head // 3
    for at in [*range(course.sink), *range(course.sink + course.zone, total)]:
        terms = [*terms, (course.keys[h, at].double(), course.values[h, at].double(), 0.0)]
    query = course.queries[head, -1].double()
    logits = torch.stack([key @ query * course.dim**-0.5 + bias for key, _, bias in terms])
    return (logits.softmax(0) @ torch.stack([value for _, value, _ in terms])).float()


def code(vector: Tensor, table: Tensor) -> tuple[bool, ...]:
    return tuple(float(x) >= 0 for x in table @ vector.float())


@pytest.mark.parametrize("dim", [64, 80])
def test_magicpig_attends_to_what_collides_twice_by_inverse_probability(dim: int) -> None:
    course, planes = Course(small("magicpig", top_k=40), length=110, dim=dim), hyperplanes(dim, 12, 4, 42, torch.device("cpu"))
    mean = None
    for _ in range(10):
        out, keys = course.step(), course.zone_keys()
        mean = keys.mean(1).float() if mean is None else mean  # of the prompt, and never again
        wanted, expected = [set(), set()], []
        codes = [[[code(k.float() - mean[h], t) for t in planes] for k in keys[h]] for h in range(2)]
        for head in range(6):
            h, terms = head // 3, []
            query = course.queries[head, -1]
            own = [code(query, t) for t in planes]
            for i, of in enumerate(codes[h]):
                if sum(a == b for a, b in zip(own, of, strict=True)) < 2:
                    continue
                wanted[h].add(i)
                cosine = float(torch.cosine_similarity(query.double(), keys[h, i] - mean[h].double(), dim=0))
                same = (1 - math.acos(cosine) / math.pi) ** 4
                chance = 1 - (1 - same) ** 12 - 12 * same * (1 - same) ** 11
                terms.append((keys[h, i], course.values[h, course.sink + i].double(), -math.log(chance)))
            assert len(terms) < 40
            expected.append(weighted(course, head, terms))
        assert course.found() == [sorted(x) for x in wanted] and all(wanted)
        torch.testing.assert_close(out, torch.stack(expected), atol=2e-5, rtol=1e-4)


def test_magicpig_takes_at_most_the_budget_per_head() -> None:
    course = Course(small("magicpig", top_k=5, bits=1, tables=12))
    course.step()
    assert all(5 <= len(row) <= 15 for row in course.found())


def test_sampling_probability_is_that_of_random_hyperplanes() -> None:
    planes = hyperplanes(8, 4000 * 3, 2, 1, torch.device("cpu"))
    a, b = torch.eye(8)[0], torch.tensor([0.6, 0.8, 0, 0, 0, 0, 0, 0])
    agree = ((planes @ a >= 0) == (planes @ b >= 0)).all(-1).view(4000, 3).sum(-1)
    measured = float((agree >= 2).float().mean())
    assert abs(measured - float(sampling_probability(torch.tensor(0.6), 2, 3))) < 0.03
    ends = sampling_probability(torch.tensor([1.0, -1.0]), 10, 150)
    assert ends[0] == 1 and ends[1] == 0


def test_magicpig_is_right_on_average_over_the_hyperplanes() -> None:
    """The estimate of one draw is rough; the mean over many draws is far nearer to full attention."""
    outs, errors, full = [], [], torch.zeros(6, 64)
    for seed in range(40):
        course = Course(small("magicpig", top_k=80, bits=2, tables=8, seed=seed), length=250)
        out = course.step()
        full = dense(course.queries[:, -1], course.keys, course.values)
        outs.append(out)
        errors.append(float((out - full).norm() / full.norm()))
    mean = torch.stack(outs).mean(0)
    assert float((mean - full).norm() / full.norm()) < 0.5 * sum(errors) / len(errors)


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


@pytest.mark.parametrize(("name", "changes", "reason"), [
    ("magicpig", {"attend": "host"}, "no CPU kernel"), ("magicpig", {"prune": "top-p"}, "stand for those that were not"),
    ("retroinfer", {"static": "observation-window"}, "count static tokens twice"),
])  # fmt: skip
def test_what_does_not_fit_is_refused(name: str, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(CompositionError, match=reason):
        methods.get(name, **changes)


@pytest.mark.parametrize(("name", "changes", "says"), [
    ("magicpig", {"gqa": "max"}, "gqa: expected one of per_head for hash-sampling"), ("magicpig", {"tables": 0}, "tables"),
    ("retroinfer", {"estimated_ratio": 1.5}, "estimated_ratio: expected a share"),
    ("retroinfer", {"cluster_tokens": 0}, "cluster_tokens"),
])  # fmt: skip
def test_impossible_parameters(name: str, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ParameterError, match=says):
        methods.get(name, **changes)

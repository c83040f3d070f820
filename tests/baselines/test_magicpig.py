"""MagicPIG: what it samples, how it weighs it, and the attention that follows, against loops."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from kvrecall import methods
from kvrecall.baselines.magicpig import sampling_probability
from kvrecall.core.errors import CompositionError, ParameterError
from kvrecall.index.hashing import hyperplanes
from tests.baselines.course import Course, weighted
from tests.baselines.small import small
from tests.one_layer import dense


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


@pytest.mark.parametrize(("changes", "reason"), [
    ({"attend": "host"}, "no CPU kernel"),
    ({"prune": "top-p"}, "stand for those that were not"),
])  # fmt: skip
def test_what_does_not_fit_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(CompositionError, match=reason):
        methods.get("magicpig", **changes)


@pytest.mark.parametrize(("changes", "says"), [
    ({"gqa": "max"}, "gqa: expected one of per_head for hash-sampling"),
    ({"tables": 0}, "tables"),
])  # fmt: skip
def test_impossible_parameters(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ParameterError, match=says):
        methods.get("magicpig", **changes)

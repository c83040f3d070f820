"""The balanced transform: moments come as they should, roots are those of the spectrum, both sides get the same moments."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvrecall.index.sphere import balance
from kvrecall.index.sphere.balance import QueryMoments, fit, geometric_mean, roots
from tests.strategies import HEAD_DIMS, gaussian


def skewed(seed: int, dim: int, condition: float, scale: float = 1.0) -> Tensor:
    """Positive definite matrices of a known condition, fp64 `[3, D, D]`."""
    turn = torch.linalg.qr(gaussian(seed, 3, dim, dim).double()).Q
    values = scale * condition ** -torch.linspace(0, 1, dim, dtype=torch.float64)
    made = (turn * values) @ turn.mT
    return (made + made.mT) / 2


def power(matrix: Tensor, exponent: float) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors * values.unsqueeze(-2) ** exponent) @ vectors.mT


def close(found: Tensor, expected: Tensor, share: float) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=share * float(expected.abs().max()))


@pytest.mark.parametrize("scale", [1e-70, 1.0, 1e70])
@pytest.mark.parametrize("condition", [1.0, 1e3, 1e6, 1e8])
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_roots_are_those_of_the_spectrum(dim: int, condition: float, scale: float) -> None:
    matrix = skewed(dim, dim, condition, scale)
    root, inverse = roots(matrix)
    close(root, power(matrix, 0.5), 1e-11)
    close(inverse, power(matrix, -0.5), 1e-15 * condition + 1e-12)  # the smallest eigenvalue is known no better


@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_geometric_mean_and_its_inverse(dim: int) -> None:
    first, second = skewed(1, dim, 1e4), skewed(2, dim, 1e2, 1e3)
    mean, inverse = geometric_mean(first, second)
    half, back = power(second, 0.5), power(second, -0.5)
    close(mean, back @ power(half @ first @ half, 0.5) @ back, 1e-10)
    close(mean @ inverse, torch.eye(dim).double().expand(3, -1, -1), 1e-10)


@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_the_worst_that_fit_can_ask_for_is_found(dim: int) -> None:
    """Everything in one direction on either side, the same one or another: the roots still are what they should be."""
    one = torch.zeros(1, dim, dim, dtype=torch.float64)
    one[0, 0, 0] = 1
    for other in (one, one.flip(1, 2)):
        a, b = balance._even(one, 1.0, balance.LEAST_VARIANCE), balance._even(other, 1.0, balance.QUERY_SHARE)
        ratios = a.diagonal(dim1=1, dim2=2) / b.diagonal(dim1=1, dim2=2)
        close(geometric_mean(a, b)[0], torch.diag_embed(ratios.sqrt()), 1e-10)
        made = fit(one, 10**6, QueryMoments(other, 10**6))
        close(made.keys.mT @ made.queries, torch.eye(dim).double().unsqueeze(0), 1e-12)


def test_balanced_sides_have_the_same_moments() -> None:
    """But for what the regularisation adds to either: here little to the keys, QUERY_SHARE of the mean to the queries."""
    of_keys, asked = skewed(4, 64, 30.0), QueryMoments(skewed(5, 64, 50.0), 10_000)
    made = fit(of_keys, 10_000, asked)
    mean = asked.moments.diagonal(dim1=1, dim2=2).mean(-1)[:, None, None]
    of_queries = asked.moments + balance.QUERY_SHARE * mean * torch.eye(64).double()
    sides = [m @ second @ m.mT for m, second in ((made.keys, of_keys), (made.queries, of_queries))]
    keys, queries = (side / side.diagonal(dim1=1, dim2=2).mean(-1)[:, None, None] for side in sides)
    close(keys, queries, 2e-3)
    close(sides[0].diagonal(dim1=1, dim2=2).sum(-1), torch.ones(3).double(), 1e-12)
    blind = fit(of_keys, 10_000)  # the keys' part in every direction is the root of what it was
    side, root = blind.keys @ of_keys @ blind.keys.mT, power(of_keys, 0.5)
    close(side, root / root.diagonal(dim1=1, dim2=2).sum(-1)[:, None, None], 2e-3)


@pytest.mark.parametrize("count", [1, 2, 63, 128])
def test_few_keys_make_no_wild_map(count: int) -> None:
    keys = gaussian(6, 2, count, 64) * torch.logspace(0.5, -1, 64)
    made = fit(torch.stack([torch.cov(own.T, correction=0) for own in keys.double()]), count)
    close(made.keys.mT @ made.queries, torch.eye(64).double().expand(2, -1, -1), 1e-12)
    assert (torch.linalg.cond(made.keys) < (1.001 if count == 1 else 40)).all()


def test_few_queries_make_no_wild_map() -> None:
    of_keys, queries = skewed(7, 64, 1.0), gaussian(8, 3, 1, 64)
    assert (torch.linalg.cond(fit(of_keys, 10_000, QueryMoments.of(queries, 3)).keys) < 2).all()


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_moments_that_say_nothing_leave_everything_as_it_is(value: float) -> None:
    nothing, some = torch.full((3, 64, 64), value, dtype=torch.float64), skewed(9, 64, 10.0)
    close(fit(some, 10_000, QueryMoments(nothing, 9)).keys, fit(some, 10_000).keys, 1e-12)
    if not value:
        close(fit(nothing, 10_000).keys, torch.eye(64).double().expand(3, -1, -1), 1e-12)


def test_query_heads_of_a_group_count_alike() -> None:
    queries = gaussian(1, 6, 11, 64)
    found, rows = QueryMoments.of(queries.bfloat16(), 2), queries.bfloat16().double().reshape(2, 33, 64)
    assert found.count == 33
    close(found.moments, rows.mT @ rows / 33, 1e-12)

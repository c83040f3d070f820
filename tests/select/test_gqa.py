"""How a group of query heads shares a search, against naive code."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvrecall.core.errors import UnknownNameError
from kvrecall.select.gqa import GQA_MODES, check_mode, reduce_scores, search_queries
from tests.strategies import DTYPES, MODES, SEEDS, examples, gaussian


def test_modes() -> None:
    assert set(GQA_MODES) == set(MODES)
    for mode in MODES:
        check_mode(mode)


def test_unknown_mode_names_the_known_ones() -> None:
    with pytest.raises(
        UnknownNameError, match=r"unknown gqa mode 'mean': expected one of max, max_softmax, mean_q, mean_softmax, per_head"
    ):
        check_mode("mean")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(1, 1), (1, 7), (3, 3), (6, 2), (32, 8)], ids=str)
def test_queries_are_grouped_by_kv_head(dtype: str, heads: tuple[int, int]) -> None:
    query_heads, kv_heads = max(heads), min(heads)
    queries = gaussian(0, 2, query_heads, 64).to(DTYPES[dtype])
    group = query_heads // kv_heads
    for mode in MODES:
        found = search_queries(queries, kv_heads, mode)
        assert found.dtype == torch.float32 and found.shape == (2, kv_heads, 1 if mode == "mean_q" else group, 64)
        for b in range(2):
            for h in range(kv_heads):
                own = queries[b, h * group : (h + 1) * group].float()
                expected = own.mean(0, keepdim=True) if mode == "mean_q" else own
                torch.testing.assert_close(found[b, h], expected)


@examples(30)
@given(seed=SEEDS, group=st.integers(1, 4), keys=st.sampled_from([1, 2, 20]), scaling=st.sampled_from([0.0883, 1.0, 3.0]))
def test_mean_softmax(seed: int, group: int, keys: int, scaling: float) -> None:
    scores = 10 * gaussian(seed, group, keys)
    expected = [0.0] * keys
    for head in scores.tolist():
        peak = max(head)
        weights = [math.exp(scaling * (x - peak)) for x in head]
        expected = [e + w / sum(weights) / group for e, w in zip(expected, weights, strict=True)]
    torch.testing.assert_close(reduce_scores(scores, "mean_softmax", scaling), torch.tensor(expected), rtol=1e-6, atol=1e-30)
    assert reduce_scores(scores, "mean_softmax", scaling).sum().item() == pytest.approx(1.0, rel=1e-6)


@examples(20)
@given(seed=SEEDS, shape=st.sampled_from([(3, 20), (2, 4, 1), (1, 2, 3, 111)]))
def test_max_and_per_head(seed: int, shape: tuple[int, ...]) -> None:
    scores = gaussian(seed, *shape)
    assert torch.equal(reduce_scores(scores, "max", 1.0), scores.max(-2).values)
    assert torch.equal(reduce_scores(scores, "per_head", 1.0), scores)


def test_mean_of_one_query_is_the_score_itself() -> None:
    scores = gaussian(0, 3, 1, 63)
    assert torch.equal(reduce_scores(scores, "mean_q", 0.1), scores[:, 0])


def test_large_scores_do_not_overflow_the_softmax() -> None:
    reduced = reduce_scores(torch.tensor([[1e30, 0.0, -1e30], [0.0, 1e30, 0.0]]), "mean_softmax", 1.0)
    assert reduced.tolist() == [0.5, 0.5, 0.0]


def test_excluded_keys_weigh_nothing_and_are_not_found() -> None:
    infinite = float("-inf")
    reduced = reduce_scores(torch.tensor([[0.0, infinite], [infinite, infinite]]), "mean_softmax", 1.0)
    assert reduced.tolist() == [0.5, infinite]


@pytest.mark.parametrize("mode", MODES)
def test_no_keys(mode: str) -> None:
    reduced = reduce_scores(torch.empty(3, 2, 0), mode, 1.0)
    assert reduced.shape == ((3, 2, 0) if mode == "per_head" else (3, 0))

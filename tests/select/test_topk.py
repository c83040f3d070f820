"""Deterministic top-k and unions against plain Python."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvrecall.select.topk import top_k_positions, union_rows
from tests.strategies import SEEDS, examples, gaussian

NUMBERS = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.5, 1e-45, -1e-45, 1e30, -1e30, math.inf, -math.inf])


def naive_top_k(scores: list[float], k: int) -> list[int]:
    return sorted(sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:k])


@examples(40)
@given(scores=st.lists(NUMBERS, min_size=1, max_size=63), k=st.integers(1, 70))
def test_ties_go_to_the_lowest_position(scores: list[float], k: int) -> None:
    """Zero and minus zero are equal; infinities rank at the ends."""
    assert top_k_positions(torch.tensor(scores), k).tolist() == naive_top_k(scores, k)


@pytest.mark.parametrize("size", [1, 63, 111, 1000, 20_000])
@pytest.mark.parametrize("distinct", [1, 2, 50, None], ids=["all-equal", "two-values", "fifty-values", "continuous"])
def test_sizes_at_which_a_sort_may_change_its_algorithm(size: int, distinct: int | None) -> None:
    scores = gaussian(size, size) if distinct is None else torch.randint(0, distinct, (size,)).float()
    for k in {1, max(1, size // 3), size}:
        assert top_k_positions(scores, k).tolist() == naive_top_k(scores.tolist(), k)
        assert torch.equal(top_k_positions(scores, k), top_k_positions(scores.clone(), k))


@examples(20)
@given(seed=SEEDS, shape=st.sampled_from([(2, 3, 20), (1, 1, 111), (4, 63)]), k=st.integers(1, 30))
def test_leading_dimensions_are_independent(seed: int, shape: tuple[int, ...], k: int) -> None:
    scores = (gaussian(seed, *shape) * 2).round()
    found = top_k_positions(scores, k)
    assert found.dtype == torch.int64 and found.shape == (*shape[:-1], min(k, shape[-1]))
    for row, got in zip(scores.flatten(0, -2).tolist(), found.flatten(0, -2).tolist(), strict=True):
        assert got == naive_top_k(row, k)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_any_score_type(dtype: torch.dtype) -> None:
    assert top_k_positions(torch.tensor([3, 1, 3, 2, 3], dtype=dtype), 2).tolist() == [0, 2]


def test_nothing_to_choose_from() -> None:
    assert top_k_positions(torch.empty(2, 0), 5).shape == (2, 0)


@examples(40)
@given(data=st.data(), rows=st.integers(1, 3), group=st.integers(1, 4), width=st.integers(0, 12))
def test_union_equals_sets(data: st.DataObject, rows: int, group: int, width: int) -> None:
    """Padding (-1) anywhere, repeats within and between heads."""
    row = st.lists(st.integers(-1, 9), min_size=width, max_size=width)
    ids = data.draw(st.lists(st.lists(row, min_size=group, max_size=group), min_size=rows, max_size=rows))
    union, counts = union_rows(torch.tensor(ids, dtype=torch.int32).view(rows, group, width))
    expected = [sorted({i for head in one for i in head if i >= 0}) for one in ids]
    longest = max(len(e) for e in expected)
    assert union.dtype == counts.dtype == torch.int32
    assert counts.tolist() == [len(e) for e in expected]
    assert union.tolist() == [e + [-1] * (longest - len(e)) for e in expected]


def test_union_of_int64_ids_with_the_largest_int32() -> None:
    union, counts = union_rows(torch.tensor([[2**31 - 2, 5], [5, -1]], dtype=torch.int64))
    assert union.tolist() == [5, 2**31 - 2] and counts.item() == 2


def test_a_union_that_is_not_cut_has_the_same_ids_and_more_padding() -> None:
    ids = torch.tensor([[[3, 1, -1], [1, 7, 3]], [[5, -1, -1], [5, 2, -1]]], dtype=torch.int32)
    found, counts = union_rows(ids)
    whole, same = union_rows(ids, cut=False)
    assert whole.shape == (2, 6) and torch.equal(counts, same)
    assert torch.equal(whole[:, : found.shape[1]], found) and (whole[:, found.shape[1] :] == -1).all()

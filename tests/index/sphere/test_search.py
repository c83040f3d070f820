"""The whole search: numba ids are the reference's ids, ties, zero norms, repeats, short zones."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvrecall.index.sphere import STAGE_ONE
from kvrecall.index.sphere.schedule import RatioStep
from tests.index.sphere.build import check_selection, found_ids, index_of, search_both, synthetic_keys
from tests.strategies import DTYPES, HEAD_DIMS, MODES, SEEDS, examples, gaussian, whole_numbers

FAMILIES = ("gaussian", "whole", "repeated", "zeros", "scales")
modes = pytest.mark.parametrize("mode", MODES)


@examples(60)
@given(
    seed=SEEDS, mode=st.sampled_from(MODES), stage1=st.sampled_from(STAGE_ONE), dim=st.sampled_from(HEAD_DIMS),
    kv_heads=st.integers(1, 3), group=st.integers(1, 4),
    lengths=st.lists(st.sampled_from([1, 2, 63, 111, 400]), min_size=1, max_size=3), top_k=st.sampled_from([1, 7, 20, 300]),
    weight=st.sampled_from(sorted(DTYPES)), family=st.sampled_from(FAMILIES), whole=st.booleans(),
)  # fmt: skip
def test_compiled_ids_are_the_references_ids(
    seed: int,
    mode: str,
    stage1: str,
    dim: int,
    kv_heads: int,
    group: int,
    lengths: list[int],
    top_k: int,
    weight: str,
    family: str,
    whole: bool,
) -> None:
    keys = [synthetic_keys(family, seed + b, kv_heads, n, dim) for b, n in enumerate(lengths)]
    index = index_of(keys, group, gqa=mode, stage1=stage1, weight_dtype=DTYPES[weight], min_candidates_per_k=2)
    queries = (whole_numbers if whole else gaussian)(seed + 9, len(lengths), kv_heads * group, dim)
    found = search_both(index, queries, top_k)
    for counts, n in zip(found.counts.tolist(), lengths, strict=True):
        most = min(n, top_k * (group if mode == "per_head" else 1))
        assert all(min(n, top_k) <= count <= most for count in counts)


@modes
@pytest.mark.parametrize("lengths", [[2047], [2048], [2049, 1], [4097, 5000, 10_001]], ids=str)
def test_zones_around_and_beyond_one_chunk_of_the_scan(mode: str, lengths: list[int]) -> None:
    keys = [synthetic_keys("repeated" if b else "gaussian", b, 2, n, 64) for b, n in enumerate(lengths)]
    search_both(index_of(keys, 2, gqa=mode), gaussian(3, len(lengths), 4, 64), 100)


@modes
@pytest.mark.parametrize("stage1", STAGE_ONE)
@pytest.mark.parametrize("query", ["zero", "one-hot", "huge", "tiny"])
def test_odd_queries(mode: str, query: str, stage1: str) -> None:
    queries = gaussian(1, 1, 4, 128) * {"zero": 0.0, "one-hot": 0.0, "huge": 1e15, "tiny": 1e-40}[query]
    if query == "one-hot":
        queries[:, :, 5] = 1.0
    found = search_both(index_of([synthetic_keys("repeated", 4, 2, 1000, 128)], 2, gqa=mode, stage1=stage1), queries, 20)
    if query == "zero" and mode != "per_head":
        assert found.counts.tolist() == [[20, 20]]


@examples(20)
@given(seed=SEEDS, mode=st.sampled_from(MODES), order=st.permutations([0, 1, 2]), some=st.integers(1, 3))
def test_a_sequence_finds_in_any_company_what_it_finds_alone(seed: int, mode: str, order: list[int], some: int) -> None:
    keys = [synthetic_keys("gaussian", seed + b, 2, n, 80) for b, n in enumerate((63, 700, 111))]
    queries, chosen = gaussian(seed, 3, 6, 80), order[:some]
    together = search_both(index_of(keys, 3, gqa=mode), queries[chosen], 9, chosen)
    for i, b in enumerate(chosen):
        alone = search_both(index_of([keys[b]], 3, gqa=mode), queries[b : b + 1], 9)
        for head in range(2):
            assert found_ids(together, i, head) == found_ids(alone, 0, head)


@modes
@pytest.mark.parametrize("numba", [True, False], ids=["numba", "reference"])
def test_zero_norms_never_beat_negative_scores(mode: str, numba: bool) -> None:
    """Every other key points away from the query, so its estimate is negative; a key of norm 0 estimates 0."""
    query = gaussian(0, 1, 1, 64)
    keys = -query + 0.3 * gaussian(1, 1, 111, 64)
    keys[:, ::3] = 0.0
    index = index_of([keys], 2, numba, gqa=mode)
    real = [i for i in range(111) if i % 3]
    assert set(found_ids(search_both(index, query.expand(1, 2, 64), 40))) <= set(real)
    # Only a budget that covers all other keys takes them, lowest position first.
    assert found_ids(search_both(index, query.expand(1, 2, 64), 74)) == real
    assert found_ids(search_both(index, query.expand(1, 2, 64), 76)) == sorted([*real, 0, 3])


@modes
def test_only_zero_norms(mode: str) -> None:
    index = index_of([torch.zeros(1, 63, 64)], 2, gqa=mode)
    assert found_ids(search_both(index, gaussian(0, 1, 2, 64), 5)) == [0, 1, 2, 3, 4]


@modes
def test_huge_keys_win_only_where_they_point_along_the_query(mode: str) -> None:
    query = gaussian(0, 1, 1, 128).expand(1, 2, 128)
    keys = 0.1 * gaussian(1, 1, 1000, 128)
    keys[0, 100:110] = -1e30 * query[0, 0]
    keys[0, 500:503] = 1e30 * query[0, 0]
    found = found_ids(search_both(index_of([keys], 2, gqa=mode), query, 50))
    assert {500, 501, 502} <= set(found) and not set(range(100, 110)) & set(found)


@modes
def test_among_equal_keys_the_lowest_positions_win(mode: str) -> None:
    keys = gaussian(2, 1, 1, 64).expand(1, 500, 64).clone()
    assert found_ids(search_both(index_of([keys], 2, gqa=mode), gaussian(3, 1, 2, 64), 9)) == list(range(9))


@modes
@pytest.mark.parametrize("tokens", [1, 5, 63])
def test_fewer_tokens_than_the_budget_gives_all_of_them(mode: str, tokens: int) -> None:
    index = index_of([gaussian(0, 2, tokens, 96), gaussian(1, 2, 111, 96)], 3, gqa=mode)
    found = search_both(index, gaussian(2, 2, 6, 96), 63)
    assert found_ids(found, 0, 0) == found_ids(found, 0, 1) == list(range(tokens))


@modes
@pytest.mark.parametrize("numba", [True, False], ids=["numba", "reference"])
def test_an_empty_sequence_in_a_batch_gives_nothing(mode: str, numba: bool) -> None:
    index = index_of([torch.empty(2, 0, 64), gaussian(1, 2, 30, 64)], 2, numba, gqa=mode)
    found = search_both(index, gaussian(2, 2, 4, 64), 7)
    assert found.counts[0].tolist() == [0, 0] and found_ids(found, 1)


def test_candidates_hold_the_selection_and_have_the_scheduled_size() -> None:
    from kvrecall.core.structs import Budget

    schedule = (RatioStep(None, 0.1, 0.2),)
    for mode in MODES:
        index = index_of([gaussian(0, 2, 1000, 64)], 3, gqa=mode, schedule=schedule, min_candidates_per_k=1)
        queries = gaussian(1, 1, 6, 64)
        (candidates,) = index.candidates(queries, Budget(10, 0.125), [0])
        assert candidates.shape == (2, 3 if mode == "per_head" else 1, 100)
        found = search_both(index, queries, 10)
        for head in range(2):
            assert set(found_ids(found, 0, head)) <= set(candidates[head].flatten().tolist())


def test_search_changes_nothing_and_its_result_survives_later_appends() -> None:
    index, queries = index_of([gaussian(0, 2, 300, 64)], 2), gaussian(1, 1, 4, 64)
    first = search_both(index, queries, 20)
    ids = first.ids.clone()
    assert torch.equal(search_both(index, queries, 20).ids, ids)
    index.append(0, 100 * queries[:, ::2].transpose(0, 1))
    assert torch.equal(first.ids, ids)
    assert 300 in found_ids(check_selection(search_both(index, queries, 20), [301]))

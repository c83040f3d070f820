"""Stage I: collision tiers against a plain-Python reading of the paper, and the sizes of both stages."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kvrecall
from kvrecall.core.errors import ParameterError
from kvrecall.index.sphere import reference
from kvrecall.index.sphere.codes import Codes, encode
from kvrecall.index.sphere.cpu_stages import bonus_table
from kvrecall.index.sphere.schedule import PAPER_SCHEDULE, RatioStep, StageSizes, check_schedule, stage_sizes
from tests.index.sphere import naive
from tests.strategies import SEEDS, examples, gaussian, whole_numbers

POWERS = [float(1 << j) for j in range(8)]
"""A query block under which centroid ids rank from 255 down: the proxy of id c is 2 c - 255."""
COUNTS = {255: 3, 254: 5, 253: 100, 252: 1, 7: 91}


def compiled_bonus(block: torch.Tensor, counts: torch.Tensor, targets: tuple[int, ...]) -> torch.Tensor:
    import numpy as np

    out = np.empty(256, np.uint8)
    bonus_table(block.numpy(), counts.int().numpy(), np.array(targets), out)
    return torch.from_numpy(out).long()


def both_bonuses(block: torch.Tensor, counts: torch.Tensor, targets: tuple[int, ...]) -> torch.Tensor:
    oracle = reference.collision_bonus(block.unsqueeze(0), counts.view(1, 1, 256), targets)[0, 0]
    assert torch.equal(compiled_bonus(block, counts, targets), oracle)
    return oracle


def test_six_tiers_admit_whole_buckets_by_exclusive_prefix() -> None:
    """200 keys, rho = 0.2: tiers end at 2, 6, 12, 20, 30 and 40 keys. Better keys: 0, 3, 8, 108, 109."""
    counts = torch.zeros(256, dtype=torch.int32)
    for centroid, members in COUNTS.items():
        counts[centroid] = members
    sizes = stage_sizes((RatioStep(None, 0.1, 0.2),), 200, 1, 1)
    assert sizes.tier_targets == (2, 6, 12, 20, 30, 40)
    bonus = both_bonuses(torch.tensor(POWERS), counts, sizes.tier_targets)
    assert [int(bonus[c]) for c in (255, 254, 253, 252, 7)] == [6, 5, 4, 0, 0]


def test_an_empty_bucket_counts_like_the_next_key_would() -> None:
    counts = torch.zeros(256, dtype=torch.int32)
    counts[0] = 10  # the worst centroid holds every key
    bonus = both_bonuses(torch.tensor(POWERS), counts, (1, 2, 3, 5, 8, 10))
    assert bonus.tolist() == [6] * 256


def test_equal_proxies_rank_by_centroid_id() -> None:
    """Query 0: all 256 proxies are equal (also -0.0 and 0.0), so ids ascend."""
    counts = torch.ones(256, dtype=torch.int32)
    for zero in (torch.zeros(8), -torch.zeros(8)):
        bonus = both_bonuses(zero, counts, (1, 2, 3, 4, 5, 6))
        assert bonus[:8].tolist() == [6, 5, 4, 3, 2, 1, 0, 0] and bonus[8:].sum() == 0


@examples(40)
@given(seed=SEEDS, tokens=st.sampled_from([1, 2, 7, 63, 111]), ratio=st.sampled_from([0.02, 0.2, 0.5, 1.0]), even=st.booleans())
def test_coarse_scores_equal_plain_python(seed: int, tokens: int, ratio: float, even: bool) -> None:
    """Whole numbers: sums are exact, ties abound. Few distinct keys make full buckets."""
    keys = whole_numbers(seed, tokens, 24, most=1 if even else 3)
    if even:
        keys = keys[torch.randint(0, tokens, (tokens,), generator=torch.Generator().manual_seed(seed)) // 3]
    query = whole_numbers(seed + 1, 24)
    made = encode(keys.unsqueeze(0), torch.eye(24))
    counts = torch.stack([torch.bincount(made.signs[0, :, s].long(), minlength=256) for s in range(3)])
    sizes = stage_sizes((RatioStep(None, 0.1, ratio),), tokens, 1, 1)
    bonus = reference.collision_bonus(query.unsqueeze(0), counts.unsqueeze(0), sizes.tier_targets)
    scores = reference.collision_scores(made.signs, bonus)[0]
    assert scores.tolist() == naive.coarse_scores(query.tolist(), keys.tolist(), ratio)
    for s in range(3):
        both_bonuses(query[8 * s : 8 * s + 8], counts[s], sizes.tier_targets)


@examples(30)
@given(seed=SEEDS, kind=st.sampled_from(["gaussian", "sparse", "equal", "huge", "tiny"]))
def test_compiled_merge_sort_ranks_like_the_stable_sort(seed: int, kind: str) -> None:
    block = gaussian(seed, 8)
    if kind == "sparse":
        block = block * (whole_numbers(seed, 8, most=1) > 0)
    elif kind == "equal":
        block = block.sign() * 0.1
    elif kind == "huge":
        block = block * 1e37
    elif kind == "tiny":
        block = block * 1e-44
    counts = torch.randint(0, 5, (256,), generator=torch.Generator().manual_seed(seed)).int()
    total = int(counts.sum())
    both_bonuses(block, counts, tuple(math.ceil(total * p) for p in naive.TIERS))


@examples(25)
@given(seed=SEEDS, tokens=st.sampled_from([5, 63, 111]), wanted=st.integers(1, 120))
def test_candidates_are_the_best_scores_and_ties_go_to_the_lowest_position(seed: int, tokens: int, wanted: int) -> None:
    keys, query = whole_numbers(seed, tokens, 16, most=1), whole_numbers(seed + 1, 16)
    keys[keys.abs().sum(-1) == 0, 0] = 1.0  # keys of zero norm are another test
    made = encode(keys.unsqueeze(0), torch.eye(16))
    counts = torch.stack([torch.bincount(made.signs[0, :, s].long(), minlength=256) for s in range(2)])
    targets = tuple(math.ceil(tokens * 0.5 * p) for p in naive.TIERS)
    got = reference.stage_one(
        made, counts.unsqueeze(0), query.view(1, 1, 16), StageSizes(min(wanted, tokens), targets), "mean_q"
    )
    assert got[0, 0].tolist() == naive.best(naive.coarse_scores(query.tolist(), keys.tolist(), 0.5), wanted)


def test_groups_share_the_largest_score_and_per_head_does_not() -> None:
    made = Codes(
        torch.tensor([[[255], [0], [15]]], dtype=torch.uint8), torch.zeros(1, 3, 3, dtype=torch.uint8), torch.ones(1, 3, 1)
    )
    counts = torch.bincount(made.signs[0, :, 0].long(), minlength=256).view(1, 1, 256)
    queries = torch.stack([torch.tensor(POWERS), -torch.tensor(POWERS)]).view(1, 2, 8)
    sizes = StageSizes(2, (1,) * 6)
    assert reference.stage_one(made, counts, queries, sizes, "max").tolist() == [[[0, 1]]]
    assert reference.stage_one(made, counts, queries, sizes, "per_head").tolist() == [[[0, 1], [0, 1]]]
    one = StageSizes(1, (1,) * 6)
    assert reference.stage_one(made, counts, queries, one, "per_head").tolist() == [[[0], [1]]]
    assert reference.stage_one(made, counts, queries, one, "mean_softmax").tolist() == [[[0]]]


@pytest.mark.parametrize(
    ("tokens", "candidates", "collisions"),
    [(4_999, 0.5, 0.5), (5_000, 0.25, 0.3), (9_999, 0.25, 0.3), (10_000, 0.2, 0.25), (29_999, 0.2, 0.25), (30_000, 0.1, 0.2)],
)
def test_paper_schedule_steps(tokens: int, candidates: float, collisions: float) -> None:
    sizes = stage_sizes(PAPER_SCHEDULE, tokens, 100, 4)
    assert sizes.candidates == math.ceil(tokens * candidates)
    assert sizes.tier_targets == tuple(math.ceil(tokens * collisions * p) for p in naive.TIERS)


@pytest.mark.parametrize(
    ("tokens", "candidates"),
    [(2_000, 800), (8_000, 1_600), (16_384, 1_639), (32_768, 1_967), (65_536, 2_622), (131_072, 3_933), (262_144, 5_243),
     (1_048_576, 15_729)],
)  # fmt: skip
def test_balanced_keys_rerank_fewer(tokens: int, candidates: int) -> None:
    ours, theirs = (method().own_index() for method in (kvrecall.ParisKVBalanced, kvrecall.ParisKV))
    assert stage_sizes(ours.steps, tokens, 100, ours.min_candidates_per_k).candidates == candidates
    assert candidates <= stage_sizes(theirs.steps, tokens, 100, theirs.min_candidates_per_k).candidates


def test_balanced_keys_rerank_eight_candidates_per_fetched_token() -> None:
    own = kvrecall.ParisKVBalanced(top_k=512).own_index()
    sizes = [stage_sizes(own.steps, tokens, 512, own.min_candidates_per_k).candidates for tokens in (3_000, 32_768, 262_144)]
    assert sizes == [3_000, 4_096, 5_243]


@examples(40)
@given(tokens=st.integers(0, 200_000), top_k=st.integers(1, 3000), least=st.integers(1, 8))
def test_guard_candidates(tokens: int, top_k: int, least: int) -> None:
    sizes = stage_sizes(PAPER_SCHEDULE, tokens, top_k, least)
    assert min(tokens, least * top_k) <= sizes.candidates <= tokens
    assert list(sizes.tier_targets) == sorted(sizes.tier_targets)
    assert sizes.tier_targets[-1] <= tokens


@pytest.mark.parametrize("ends", [(), (5,), (None, None), (10, 5, None), (5, 5, None), (None, 5)])
def test_impossible_schedules(ends: tuple[int | None, ...]) -> None:
    with pytest.raises(ParameterError, match="schedule"):
        check_schedule(tuple(RatioStep(end, 0.1, 0.1) for end in ends))


@pytest.mark.parametrize("ratio", [0.0, -0.1, 1.5, float("nan")])
def test_impossible_ratios(ratio: float) -> None:
    with pytest.raises(ParameterError, match="candidate_ratio"):
        RatioStep(None, ratio, 0.1)
    with pytest.raises(ParameterError, match="collision_ratio"):
        RatioStep(None, 0.1, ratio)

"""The first stage by one-bit inner products: what its tables add up to, and that it finds more than collisions do."""

from __future__ import annotations

import pytest
import torch

import kvrecall
from kvrecall.errors import UnknownNameError
from kvrecall.index.sphere import reference
from kvrecall.index.sphere.codes import encode, unpack_signs
from kvrecall.index.sphere.rotation import rotation_matrix
from kvrecall.index.sphere.schedule import RatioStep
from kvrecall.structs import Budget
from tests.index.sphere.build import index_of
from tests.strategies import HEAD_DIMS, gaussian


@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_scores_are_the_products_with_the_signs_up_to_rounding(dim: int) -> None:
    codes = encode(gaussian(1, 2, 500, dim), rotation_matrix(dim, 42))
    queries = gaussian(2, 2, dim)
    table = reference.product_bonus(queries)
    scores = reference.collision_scores(codes.signs, table)
    assert table.min() >= 0 and table.sum(-2).amax() <= 2 * reference.PEAK_SCORE
    signs = unpack_signs(codes.signs).flatten(-2)
    exact = torch.einsum("hnd,hd->hn", signs, queries)
    size = queries.abs().sum(-1, keepdim=True)
    expected = (exact / size + 1) / 2 * reference.PEAK_SCORE
    assert scores.max() <= reference.PEAK_SCORE + dim // 16  # half a step per block at most: one byte holds them
    assert (scores - expected).abs().max() <= dim // 8 / 2 + 1e-3


def test_every_sign_agreeing_scores_highest_and_none_lowest() -> None:
    query = gaussian(3, 1, 64)
    codes = encode(torch.stack([query[0], -query[0]])[None], torch.eye(64))
    scores = reference.collision_scores(codes.signs, reference.product_bonus(query))
    assert abs(int(scores[0, 0]) - reference.PEAK_SCORE) <= 4 and int(scores[0, 1]) == 0


def test_a_zero_query_scores_everything_alike() -> None:
    assert not reference.product_bonus(torch.zeros(1, 64)).any()


def test_products_find_more_of_the_best_than_collisions() -> None:
    keys, queries = gaussian(5, 2, 4000, 128), gaussian(6, 1, 2, 128)
    truth = [set(row.topk(50).indices.tolist()) for row in torch.einsum("hnd,hd->hn", keys, queries[0])]
    found = {}
    for stage1 in ("collision", "product"):
        index = index_of([keys], 1, gqa="max", stage1=stage1, schedule=(RatioStep(None, 0.1, 0.2),), min_candidates_per_k=1)
        candidates = index.candidates(queries, Budget(50, 1.0), [0])[0]
        found[stage1] = sum(len(truth[h] & set(candidates[h, 0].tolist())) for h in range(2))
    assert found["product"] > found["collision"] + 5


def test_an_unknown_first_stage_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="product"):
        kvrecall.ParisKV(stage1="products").index_config()

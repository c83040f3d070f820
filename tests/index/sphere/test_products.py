"""The first stage by one-bit inner products: what its tables add up to, and that it finds more than collisions do."""

from __future__ import annotations

import pytest
import torch

import kvrecall
from kvrecall.core.errors import UnknownNameError
from kvrecall.core.structs import Budget
from kvrecall.index.sphere import reference
from kvrecall.index.sphere.codes import encode, unpack_signs
from kvrecall.index.sphere.maps import rotation_matrix
from kvrecall.index.sphere.schedule import RatioStep
from tests.index.sphere.build import index_of
from tests.strategies import HEAD_DIMS, gaussian


@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_scores_are_the_products_with_the_signs_up_to_rounding(dim: int) -> None:
    codes = encode(gaussian(1, 2, 500, dim), rotation_matrix(dim, 42))
    queries = gaussian(2, 2, dim)
    offset, shift, top = reference.product_scale(dim)
    scores = reference.product_scores(codes.signs, reference.product_entries(queries))
    signs = unpack_signs(codes.signs).flatten(-2)
    exact = torch.einsum("hnd,hd->hn", signs, queries)
    expected = (exact * reference.PRODUCT_RMS * dim**0.5 / queries.norm(dim=-1, keepdim=True) + offset) / 2**shift
    assert ((scores + 0.5) - expected).abs().max() <= 0.5 + dim / 2 / 2**shift
    assert torch.corrcoef(torch.stack([scores[0].float(), exact[0]]))[0, 1] > 0.98
    assert scores.min() > 0 and scores.max() < top


@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_the_largest_usual_product_fits_the_scores(dim: int) -> None:
    offset, shift, top = reference.product_scale(dim)
    assert (2 * offset) >> shift <= top + 3 and (2 * offset) >> shift > top // 2


@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_products_with_norms_are_told_apart_as_finely_in_half_as_many_scores(dim: int) -> None:
    plain, scaled = reference.product_scale(dim), reference.product_scale(dim, norms=True)
    assert scaled.shift == plain.shift and scaled.top == plain.top // 2 - 1
    lowest, highest = -scaled.offset, (scaled.top << scaled.shift) - scaled.offset
    assert lowest <= -dim and 2 * dim <= highest  # two deviations below the mean, four above


def test_every_sign_agreeing_scores_highest_and_none_lowest() -> None:
    query = gaussian(3, 1, 64)
    codes = encode(torch.stack([query[0], -query[0]])[None], torch.eye(64))
    scores = reference.product_scores(codes.signs, reference.product_entries(query))
    top = reference.product_scale(64).top
    assert int(scores[0, 0]) >= 0.9 * top and int(scores[0, 1]) <= 0.1 * top


def test_a_dominant_coordinate_is_cut_off_and_keeps_its_sign() -> None:
    query = torch.full((1, 64), 0.01)
    query[0, 5] = -100.0
    made = reference.quantised_queries(query)
    assert made[0, 5] == -reference.PRODUCT_PEAK and made.abs().max() == reference.PRODUCT_PEAK


def test_a_zero_query_scores_everything_alike() -> None:
    assert not reference.product_entries(torch.zeros(1, 64)).any()


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

"""Searches over centred keys: every path finds the same ids, and what the centres took from a score comes back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvrecall.core.structs import Budget
from kvrecall.index.sphere.cos_sin import SPAN
from kvrecall.index.sphere.maps import Maps
from kvrecall.index.sphere.schedule import RatioStep
from kvrecall.index.statistics import NoRotary
from tests.index.sphere.build import found_ids, search_both
from tests.index.sphere.with_statistics import Halves, Model, filled
from tests.strategies import HEAD_DIMS, MODES

STEP = (RatioStep(None, 0.2, 0.3),)
LENGTHS = [(63, 64), (65, 128), (1, 2047), (2048, 2049), (700, 0)]
"""Around multiples of a span, and of a chunk of the numba scan."""


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_compiled_ids_are_the_references(mode: str, lengths: tuple[int, ...]) -> None:
    for number, dim in enumerate((64, 80, 128)):
        model = Model(number, 2, 3, dim, Halves(dim, dim // 2) if number else NoRotary(dim))
        keys = [model.keys(b, n) for b, n in enumerate(lengths)]
        keys[0][:, 11::40] = 0
        weights = ("uint8", "bfloat16", "float32")[number]
        index = filled(model.layer(2), keys, gqa=mode, schedule=STEP, min_candidates_per_k=1, weight_dtype=weights)
        index.exclude(0, torch.arange(3, max(3, min(40, lengths[0])), 2, dtype=torch.int32).expand(2, -1))
        queries = model.queries(7, 2, 9_000).transpose(0, 1)
        found = search_both(index, queries, 11)
        assert not set(found_ids(found)) & set(range(3, 40, 2))
        search_both(index, queries[:1], 30, [1])


@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_every_head_size(dim: int) -> None:
    model = Model(1, 2, 2, dim)
    index = filled(model.layer(2), [model.keys(1, 300), model.keys(2, 129)], gqa="mean_softmax", schedule=STEP)
    search_both(index, model.queries(3, 2, 300).transpose(0, 1), 20)


@pytest.mark.parametrize("numba", [True, False], ids=["numba", "reference"])
def test_a_sequence_finds_in_any_company_what_it_finds_alone(numba: bool) -> None:
    model = Model(1, 2, 2, 64)
    keys, queries = [model.keys(b, n) for b, n in enumerate((300, 65, 190))], model.queries(9, 3).transpose(0, 1)
    index = filled(model.layer(3), keys, numba, schedule=STEP)
    found = search_both(index, queries[[2, 0, 1]], 9, [2, 0, 1])
    for at, b in enumerate((2, 0, 1)):
        alone = search_both(filled(model.layer(), [keys[b]], numba, schedule=STEP), queries[b : b + 1], 9)
        assert [found_ids(found, at, h) for h in range(2)] == [found_ids(alone, 0, h) for h in range(2)]


def recall(model: Model, seed: int, candidates: bool, **config: Any) -> float:
    """Mean recall@20 of stage I's 5 % or of what is fetched, by queries that come after the keys."""
    keys, asked = model.keys(seed, 3000), model.queries(seed, 12, 3000).transpose(0, 1)
    schedule = (RatioStep(None, 0.05, 0.2),)
    index = filled(model.layer(tokens=4096), [keys], schedule=schedule, min_candidates_per_k=1, gqa="mean_q", **config)
    hits, budget = 0, Budget(20, 0.1)
    for queries in asked:
        if candidates:
            found = index.candidates(queries[None], budget, [0])[0][:, 0]
        else:
            found = index.search(queries[None], budget, [0]).ids[0]
        for own, query, ids in zip(keys, queries, found, strict=True):
            hits += len(set((own @ query).topk(20).indices.tolist()) & set(ids.tolist()))
    return hits / (20 * len(asked) * len(keys))


PLAIN: dict[str, Any] = {"center": False, "balance": False, "norms": False, "weight_dtype": "bfloat16"}


@pytest.mark.parametrize("candidates", [True, False], ids=["candidates", "fetched"])
@pytest.mark.parametrize("seed", range(3))
def test_keys_that_drift_with_their_position_are_found_by_their_codes(seed: int, candidates: bool) -> None:
    """As well as keys that have no mean, which do not drift."""
    model, still = (Model(seed, 2, 1, 128, mean=mean) for mean in (4.0, 0.0))
    ours, balanced, plain = (recall(model, seed, candidates, **kind) for kind in ({}, {"center": False}, PLAIN))
    assert ours > 0.97 * recall(still, seed, candidates) and ours > balanced + 0.02 and ours > plain + 0.1


def scaled(factor: float, shifts: Callable[..., Any] = Maps.shifts) -> Callable[..., Any]:
    return lambda self, queries, tokens: factor * shifts(self, queries, tokens)


@pytest.mark.parametrize("candidates", [True, False], ids=["candidates", "fetched"])
def test_what_centres_take_from_scores_must_come_back(candidates: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In both stages, with its sign and its size."""
    model = Model(0, 2, 1, 128)
    ours = recall(model, 0, candidates)
    for factor, lost in ((0.0, 0.2), (-1.0, 0.6), (0.5, 0.03)):
        monkeypatch.setattr(Maps, "shifts", scaled(factor))
        assert recall(model, 0, candidates) < ours - lost, factor


@pytest.mark.parametrize("mode", ["max", "per_head", "mean_softmax"])
def test_heads_of_a_group_are_compared_by_true_products(mode: str) -> None:
    """What centring takes from the products of a group's heads differs, and comes back to each."""
    model = Model(5, 1, 4, 64)
    keys, queries = model.keys(1, 600), model.queries(1, 1, 600).transpose(0, 1)
    whole = (RatioStep(None, 1.0, 1.0),)
    index = filled(model.layer(tokens=4096), [keys], gqa=mode, schedule=whole, weight_dtype="float32")
    products = queries[0] @ keys[0].T * 64**-0.5
    found = set(found_ids(search_both(index, queries, 40)))
    if mode == "per_head":
        shares = [len(set(own.topk(40).indices.tolist()) & found) / 40 for own in products]
        assert min(shares) > 0.85
    else:
        merged = products.amax(0) if mode == "max" else products.softmax(-1).mean(0)
        assert len(set(merged.topk(40).indices.tolist()) & found) >= 35


def test_shifts_are_of_the_span_of_each_token() -> None:
    """Keys at their centres: scores are the shifts alone, so the best span's tokens are found, lowest first."""
    model = Model(2, 1, 1, 64)
    layer = model.layer(tokens=4096)
    maps = filled(layer, []).maps
    keys = maps.centres(0, 5 * SPAN)
    assert keys is not None
    index = filled(layer, [keys], gqa="mean_q", schedule=(RatioStep(None, 1.0, 1.0),), weight_dtype="float32")
    for query in model.queries(3, 6, 400).transpose(0, 1):
        best = int((keys[0, ::SPAN] @ query[0]).argmax())
        assert found_ids(search_both(index, query[None], 10)) == list(range(best * SPAN, best * SPAN + 10))

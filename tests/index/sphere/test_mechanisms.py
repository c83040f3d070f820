"""Each named mechanism earns its place: without it, recall on keys of the kind it is for is clearly lower."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvrecall.core.structs import Budget
from kvrecall.index.sphere import SphereConfig, SphereIndex, codes, reference, schedule
from kvrecall.index.sphere.codes import Codes, encode
from kvrecall.index.sphere.maps import rotation_matrix
from kvrecall.index.sphere.schedule import RatioStep, stage_sizes
from kvrecall.select.topk import top_k_positions
from tests.index.sphere.build import shape
from tests.strategies import gaussian

TOKENS, DIM, QUERIES, K = 2000, 128, 24, 50
NARROW = (RatioStep(None, 0.1, 0.2),)


def truth(keys: Tensor, query: Tensor, k: int = K) -> set[int]:
    return set((keys @ query).topk(k).indices.tolist())


def searched(keys: Tensor, queries: Tensor, *, candidates: bool = False, **config: Any) -> float:
    """Mean recall@K over queries `[Q, D]` on keys `[n, D]`, of the fetched ids or of stage I's candidates."""
    config = {"schedule": NARROW, "min_candidates_per_k": 1, **config}
    index = SphereIndex(shape(1, 1, 1, keys.shape[1]), SphereConfig(**config))
    index.append(0, keys.unsqueeze(0))
    hits = 0
    for query in queries:
        budget = Budget(K, keys.shape[1] ** -0.5)
        if candidates:
            found = index.candidates(query.view(1, 1, -1), budget, [0])[0]
        else:
            found = index.search(query.view(1, 1, -1), budget, [0]).ids
        hits += len(truth(keys, query) & set(found.flatten().tolist()))
    return hits / (K * len(queries))


def clustered(seed: int) -> tuple[Tensor, Tensor]:
    """Keys around a common direction, as attention keys are, and queries with some affinity to some of them."""
    keys = gaussian(seed, TOKENS, DIM) + 0.5 * gaussian(seed + 1, 1, DIM)
    queries = gaussian(seed + 2, QUERIES, DIM) + 0.5 * keys[:QUERIES]
    return keys, queries


@pytest.mark.parametrize("seed", range(3))
def test_collision_tiers(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At rho = 0.5, the paper's ratio for short zones. (Around 0.2 a single tier does as well on such keys.)"""
    keys, queries = clustered(seed)
    wide = {"candidates": True, "schedule": (RatioStep(None, 0.1, 0.5),)}
    tiers = searched(keys, queries, **wide)
    monkeypatch.setattr(schedule, "TIER_PERCENTILES", (1.0,))
    assert tiers > searched(keys, queries, **wide) + 0.05


@pytest.mark.parametrize("seed", range(3))
def test_rotation(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few channels far larger than the rest and of one sign: unrotated, every key has the same signs where it matters."""
    keys, queries = gaussian(seed, TOKENS, DIM), gaussian(seed + 1, QUERIES, DIM)
    keys[:, 3::32] = 40 + 10 * keys[:, 3::32]
    rotated = searched(keys, queries)
    monkeypatch.setattr("kvrecall.index.sphere.maps.rotation_matrix", lambda dim, seed: torch.eye(dim))
    assert rotated > searched(keys, queries) + 0.1


@pytest.mark.parametrize("seed", range(3))
def test_alpha_correction(seed: int) -> None:
    """Keys of one norm, half with nearly one-hot blocks (alpha 0.8), half with blocks of equal magnitudes (alpha 1.1)."""
    rotation = rotation_matrix(DIM, 42)
    blocks = gaussian(seed, TOKENS, DIM // 8, 8).sign() + 0.02 * gaussian(seed + 1, TOKENS, DIM // 8, 8)
    spiky = torch.arange(TOKENS) % 2 == 0
    blocks[spiky] *= torch.tensor([1.0] + [0.03] * 7)
    blocks = 8**0.5 * blocks / blocks.norm(dim=-1, keepdim=True)
    keys = blocks.flatten(-2) @ rotation  # so that the rotated keys are `blocks`
    made = encode(keys.unsqueeze(0), rotation, torch.float32)
    uncorrected = Codes(made.signs, made.magnitudes, torch.full_like(made.weights, 8**0.5))
    recall = [0.0, 0.0]
    for query in gaussian(seed + 3, QUERIES, DIM):
        true = truth(blocks.flatten(-2), query)
        for i, summaries in enumerate((made, uncorrected)):
            estimate = reference.estimate_scores(summaries, query.unsqueeze(0))[0]
            recall[i] += len(true & set(top_k_positions(estimate, K).tolist())) / (K * QUERIES)
    assert recall[0] > recall[1] + 0.1


@pytest.mark.parametrize("seed", range(3))
def test_rerank(seed: int) -> None:
    """The coarse score alone (ties to the lowest position) against the 4-bit estimate over the same candidates."""
    keys, queries = clustered(seed)
    index = SphereIndex(shape(1, 1, 1, DIM), SphereConfig(schedule=NARROW))
    index.append(0, keys.unsqueeze(0))
    sizes = stage_sizes(NARROW, TOKENS, K, 1)
    coarse_hits = 0
    for query in queries:
        bonus = reference.collision_bonus(
            (query @ index.maps.rotation.T).view(1, 1, -1), index.counts[0].unsqueeze(1), sizes.tier_targets
        )
        scores = reference.collision_scores(index.codes(0).signs.unsqueeze(1), bonus)[0, 0]
        coarse_hits += len(truth(keys, query) & set(top_k_positions(scores, K).tolist()))
    assert searched(keys, queries) > coarse_hits / (K * QUERIES) + 0.15


@pytest.mark.parametrize("seed", range(3))
def test_magnitude_bits(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Signs alone (all magnitudes equal) rerank worse than signs and three bits."""
    keys, queries = clustered(seed)
    full = searched(keys, queries)
    monkeypatch.setattr(
        codes, "lloyd_max", lambda m: (torch.ones(7).double().numpy() * 2, torch.full((8,), 8**-0.5).double().numpy())
    )
    monkeypatch.setattr(SphereIndex, "_encode", lambda self, k, first: encode(k, self.maps.rotation, torch.float32))
    assert full > searched(keys, queries) + 0.05


@pytest.mark.parametrize("seed", range(3))
def test_guard_candidates(seed: int) -> None:
    """Four candidates per fetched token, where the schedule alone would leave as many as are fetched."""
    keys, queries = clustered(seed)
    tight = (RatioStep(None, K / TOKENS, 0.2),)
    guarded, bare = (searched(keys, queries, schedule=tight, min_candidates_per_k=c) for c in (4, 1))
    assert guarded > bare + 0.05


@pytest.mark.parametrize("seed", range(3))
def test_per_head_search_finds_what_the_mean_query_cancels(seed: int) -> None:
    """Two heads of a group that look for opposite things: their mean points at neither."""
    keys = gaussian(seed, TOKENS, DIM)
    first = gaussian(seed + 1, DIM)
    pair = torch.stack([first, -first + 0.1 * gaussian(seed + 2, DIM)])
    recall = {}
    for mode in ("mean_q", "mean_softmax", "per_head"):
        index = SphereIndex(shape(1, 1, 2, DIM), SphereConfig(gqa=mode, schedule=NARROW))
        index.append(0, keys.unsqueeze(0))
        found = set(index.search(pair.unsqueeze(0), Budget(K, DIM**-0.5), [0]).ids.flatten().tolist())
        recall[mode] = sum(len(truth(keys, q, K // 2) & found) for q in pair) / K
    assert recall["per_head"] > recall["mean_softmax"] > recall["mean_q"] + 0.1

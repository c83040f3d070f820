"""Searches in query centroids against Algorithm 2 (b) and (c) written as loops, and the pool of tokens behind the lists."""

from __future__ import annotations

import math

import numba
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvrecall.core.fp8 import quantised
from kvrecall.core.structs import Budget
from kvrecall.index.query_centroids import CentroidConfig, CentroidIndex, cpu, reference
from kvrecall.index.query_centroids.lists import Recalled, directions
from kvrecall.index.query_centroids.rerank import rerank
from tests.blocks import filled
from tests.index.query_centroids.zone import KV_HEADS, Zone, prompt, query_of
from tests.strategies import DTYPES, HEAD_DIMS, SEEDS, examples, gaussian, generator


def random_lists(seed: int, count: int, rho: int, tokens: int) -> Tensor:
    """Id lists `[2, count, rho]` with repetitions and -1."""
    return torch.randint(-1, tokens, (KV_HEADS, count, rho), generator=generator(seed), dtype=torch.int32)


def excluded_ids(seed: int, tokens: int, count: int) -> Tensor | None:
    if not count:
        return None
    rows = [torch.randperm(tokens, generator=generator(seed + h))[:count].sort().values for h in range(KV_HEADS)]
    return torch.stack(rows).to(torch.int32)


@examples(40)
@given(
    seed=SEEDS, count=st.integers(0, 4), rho=st.sampled_from([0, 1, 9]), tokens=st.sampled_from([1, 2, 30, 111]),
    pool=st.sampled_from([0, 1, 7, 200]), excluded=st.sampled_from([0, 1, 5]),
)  # fmt: skip
def test_distinct_is_the_union(seed: int, count: int, rho: int, tokens: int, pool: int, excluded: int) -> None:
    lists, out = random_lists(seed, count, rho, tokens), excluded_ids(seed, tokens, min(excluded, tokens))
    first = max(0, tokens - pool)
    ids, counts = cpu.distinct(lists, tokens, first, out)
    plain = reference.distinct(lists, tokens, first, out)
    assert torch.equal(ids, plain[0][:, : ids.shape[1]]) and torch.equal(counts, plain[1])
    assert ids.dtype == counts.dtype == plain[0].dtype == plain[1].dtype == torch.int32
    for h in range(KV_HEADS):
        wanted = (set(lists[h].flatten().tolist()) | set(range(first, tokens))) - {-1}
        wanted -= set() if out is None else set(out[h].tolist())
        assert ids[h].tolist() == sorted(wanted) + [-1] * (ids.shape[1] - len(wanted)) and counts[h] == len(wanted)


@examples(30)
@given(
    seed=SEEDS, dim=st.sampled_from(HEAD_DIMS), dtype=st.sampled_from(sorted(DTYPES)), group=st.sampled_from([1, 3, 8]),
    tokens=st.sampled_from([1, 16, 45, 130]), block_size=st.sampled_from([16, 64]), kept=st.sampled_from([1, 6, 200]),
    small=st.booleans(),
)  # fmt: skip
def test_scores_are_exact_products(
    seed: int, dim: int, dtype: str, group: int, tokens: int, block_size: int, kept: int, small: bool
) -> None:
    rows = gaussian(seed, KV_HEADS, tokens, 2, dim).to(DTYPES[dtype])
    table = filled(rows, block_size=block_size, small=small).table(rows.device)
    rows = quantised(rows.float()).dequantise() if small else rows  # fp32 products of scales and numbers
    assert table is not None
    queries = gaussian(seed + 1, KV_HEADS, group, dim)
    ids, counts = reference.distinct(random_lists(seed, 1, kept, tokens), tokens, tokens, None)
    scores = cpu.score_rows(queries, table, ids, counts)
    assert scores.shape == (KV_HEADS, group, ids.shape[1]) and scores.dtype == torch.float32
    for h in range(KV_HEADS):
        own = ids[h, : int(counts[h])].long()
        exact = queries[h].double() @ rows[h, own, 0].double().T
        torch.testing.assert_close(scores[h, :, : len(own)].double(), exact, atol=1e-4, rtol=1e-5)


@examples(20)
@given(
    seed=SEEDS, dtype=st.sampled_from(sorted(DTYPES)), mode=st.sampled_from(CentroidConfig.modes),
    top_k=st.sampled_from([1, 7, 300]),
)  # fmt: skip
def test_host_and_device_rerank_alike(seed: int, dtype: str, mode: str, top_k: int) -> None:
    zone = Zone(CentroidConfig(), dtype=DTYPES[dtype])
    zone.add(gaussian(seed, KV_HEADS, 90, 64))
    ids, counts = reference.distinct(random_lists(seed, 2, 30, 90), 90, 85, None)
    queries = gaussian(seed + 1, KV_HEADS, 3, 64)
    asked = zone.pool, ids, counts, Budget(top_k, 0.125), mode
    host, device = (rerank(queries, *asked, where, list_tokens=20) for where in (True, False))
    assert torch.equal(host.best[0], device.best[0]) and torch.equal(host.best[1], device.best[1])
    torch.testing.assert_close(host.scores, device.scores, atol=1e-4, rtol=1e-5)
    query = Recalled(*directions(queries.flatten(0, 1)), ids)
    one, other = (found.as_centroid(query) for found in (host, device))
    assert torch.equal(one.ids, other.ids)
    torch.testing.assert_close(one.lse, other.lse, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(one.scores, other.scores, atol=0.02, rtol=0.01)  # bf16


@pytest.mark.parametrize("mode", cpu.MODES)
@pytest.mark.parametrize("most", [300, 340], ids=["cut", "padded"])
def test_a_rerank_of_many_pieces_and_of_a_head_without_rows(mode: str, most: int) -> None:
    """Heads have several pieces, whole ones, none, one row, and one row in a second piece."""
    counts = torch.tensor([300, 256, 0, 1, 129], dtype=torch.int32)
    source, queries = filled(gaussian(0, 5, 400, 2, 64), block_size=16), gaussian(1, 5, 3, 64)
    ids = torch.full((5, most), -1, dtype=torch.int32)
    for h, count in enumerate(counts.tolist()):
        ids[h, :count] = torch.randperm(400, generator=generator(h))[:count].sort().values
    asked = source, ids, counts, Budget(40, 0.125), mode
    host, device = (rerank(queries, *asked, where, list_tokens=150) for where in (True, False))
    assert torch.equal(host.best[0], device.best[0]) and torch.equal(host.best[1], device.best[1])
    assert host.best[1].tolist() == [40, 40, 0, 1, 40]
    assert torch.equal(host.listed[0], device.listed[0]) and (host.listed[0] >= 0).sum(1).tolist() == [150, 150, 0, 1, 129]
    torch.testing.assert_close(host.listed[1], device.listed[1], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(host.lse, device.lse, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(host.scores, device.scores, atol=1e-4, rtol=1e-5)
    before = numba.get_num_threads()
    try:
        numba.set_num_threads(1)
        alone = rerank(queries, *asked, True, list_tokens=150)
    finally:
        numba.set_num_threads(before)
    assert torch.equal(alone.scores, host.scores) and torch.equal(alone.lse, host.lse)
    assert torch.equal(alone.best[0], host.best[0]) and torch.equal(alone.listed[1], host.listed[1])


def recalled_by_hand(zone: Zone, query: Tensor, h: int) -> list[int]:
    """Algorithm 2 (b): the lists of the most similar centroids and what is behind the lists."""
    index, lists = zone.index, zone.lists
    group = query.shape[0] // KV_HEADS
    cosines = []
    for c in range(lists.queries.shape[1]):
        own = [(lists.queries[g, c].double(), query[g].double()) for g in range(h * group, (h + 1) * group)]
        cosines.append(max(float(a @ b / (a.norm() * b.norm())) for a, b in own))
    near = sorted(range(len(cosines)), key=lambda c: (-cosines[c], c))[: index._config.recalled_centroids]
    found = {i for c in near for i in lists.ids[h, c].tolist()} | set(range(index._listed[0], index.lengths[0]))
    return sorted(found - {-1})


def reranked_by_hand(
    keys: Tensor, query: Tensor, h: int, ids: list[int], top_k: int, excluded: Tensor | None = None
) -> list[int]:
    """Algorithm 2 (c): softmax over the recalled per head, maximum over the group, the best top_k that are not barred."""
    group = query.shape[0] // KV_HEADS
    best = [-math.inf] * len(ids)
    for g in range(h * group, (h + 1) * group):
        logits = [float(query[g].double() @ keys[h, i].double()) * 0.125 for i in ids]
        total = math.log(sum(math.exp(x - max(logits)) for x in logits)) + max(logits) if logits else 0.0
        best = [max(old, x - total) for old, x in zip(best, logits, strict=True)]
    allowed = [i for i in range(len(ids)) if excluded is None or ids[i] not in excluded[h]]
    order = sorted(allowed, key=lambda i: (-best[i], i))[:top_k]
    return sorted(ids[i] for i in order)


@pytest.mark.parametrize("where", ["host", "device"])
@examples(25)
@given(
    seed=SEEDS, group=st.sampled_from([1, 3, 8]), tokens=st.sampled_from([5, 40, 150]), rho=st.sampled_from([1, 8, 40]),
    near=st.sampled_from([1, 3, 50]), top_k=st.sampled_from([1, 6, 30, 500]), later=st.sampled_from([0, 3, 12]),
    excluded=st.sampled_from([0, 4]), dtype=st.sampled_from(sorted(DTYPES)),
)  # fmt: skip
def test_a_search_is_algorithm_2(
    where, seed: int, group: int, tokens: int, rho: int, near: int, top_k: int, later: int, excluded: int, dtype: str
) -> None:
    config = CentroidConfig(
        max_centroids=12, tokens_per_centroid=4, list_tokens=rho, recalled_centroids=near, pool_tokens=5, rerank=where
    )
    zone = prompt(config, seed, tokens, group=group, dtype=DTYPES[dtype])
    zone.add(gaussian(seed + 7, KV_HEADS, later, 64))
    zone.index.exclude(0, excluded_ids(seed, tokens, excluded))
    for number in range(3):  # each learned query is a centroid of the next search
        query = query_of(seed + 10 + number, group, DTYPES[dtype])
        found = zone.search(query, top_k)
        for h in range(KV_HEADS):
            recalled = recalled_by_hand(zone, query, h)
            assert found[h] == reranked_by_hand(zone.keys, query, h, recalled, top_k, zone.index._excluded[0])
        zone.index.after_attention([0])


def test_excluded_ids_are_never_found_until_they_are_allowed_again() -> None:
    zone = prompt(CentroidConfig(tokens_per_centroid=4, list_tokens=30), 0, 60)
    query = query_of(1)
    before = zone.search(query, 10)
    ids = torch.tensor(before, dtype=torch.int32)[:, :6].contiguous()
    zone.index.exclude(0, ids)
    for number in range(8):
        found = zone.search(query if not number else query_of(number), 500)
        assert all(found[h] and not set(found[h]) & set(ids[h].tolist()) for h in range(KV_HEADS))
    zone.index.exclude(0, None)
    assert zone.search(query, 10) == before


def test_fewer_candidates_than_the_budget_are_all_found() -> None:
    config = CentroidConfig(max_centroids=4, list_tokens=3, recalled_centroids=2, pool_tokens=1)
    zone = prompt(config, 0, 80)
    for h, found in enumerate(zone.search(query_of(1), 50)):
        assert found == recalled_by_hand(zone, query_of(1), h) and 3 <= len(found) <= 7


def test_unlike_heads_are_padded() -> None:
    """One head's two lists are the same, the other's have nothing in common."""
    zone = prompt(CentroidConfig(max_centroids=2, list_tokens=2, recalled_centroids=2, pool_tokens=0), 0, 40)
    zone.lists.ids.copy_(torch.tensor([[[4, 9], [4, 9]], [[1, 2], [3, 30]]]))
    found = zone.index.search(query_of(1).unsqueeze(0), Budget(8, 0.125), [0])
    assert found.ids.tolist() == [[[4, 9, -1, -1], [1, 2, 3, 30]]] and found.counts.tolist() == [[2, 4]]
    assert zone.index.deduplication(query_of(1), 0) == 0.75  # the mean of 2 of 4 and 4 of 4


def test_the_largest_softmax_of_the_group_decides() -> None:
    """A key that one query head wants and its two neighbours detest; means over the group would rank it last."""
    zone = Zone(CentroidConfig())
    query = query_of(0)
    keys = gaussian(1, KV_HEADS, 30, 64)
    keys[:, 17] = 4 * query[[0, 3]] - 8 * query[[1, 4]] - 8 * query[[2, 5]]
    zone.add(keys)
    assert all(17 in found for found in zone.search(query, 3))
    mean = Zone(CentroidConfig(gqa="mean_softmax"))
    mean.add(gaussian(2, KV_HEADS, 30, 64))  # the same question has another answer in another mode
    assert mean.search(query, 3) != zone.search(query, 3)


@pytest.mark.parametrize("mode", CentroidConfig.modes)
def test_without_observed_queries_everything_is_recalled(mode: str) -> None:
    zone = Zone(CentroidConfig(gqa=mode, pool_tokens=2))
    zone.add(gaussian(0, KV_HEADS, 100, 64))
    zone.index.end_of_prompt(0, None, 0)
    assert zone.search(query_of(1), 500) == [list(range(100))] * KV_HEADS
    if mode == "max_softmax":
        for h in range(KV_HEADS):
            assert zone.search(query_of(1), 9)[h] == reranked_by_hand(zone.keys, query_of(1), h, list(range(100)), 9)


def test_mean_q_is_refused_with_a_reason() -> None:
    with pytest.raises(Exception, match="mean of several queries"):
        CentroidConfig(gqa="mean_q")


@pytest.mark.parametrize("name", ["max_centroids", "tokens_per_centroid", "list_tokens", "recalled_centroids", "pool_tokens"])
def test_impossible_numbers_are_refused(name: str) -> None:
    for value in (-1, 2.5):
        with pytest.raises(Exception, match=name):
            CentroidConfig(**{name: value})  # type: ignore[arg-type]
    with pytest.raises(Exception, match="device"):
        CentroidConfig(rerank="elsewhere")  # type: ignore[arg-type]


def test_candidates_are_what_is_recalled() -> None:
    zone = prompt(CentroidConfig(max_centroids=6, list_tokens=9, pool_tokens=3, recalled_centroids=2), 0, 60)
    zone.add(gaussian(4, KV_HEADS, 2, 64))
    (found,) = zone.index.candidates(query_of(1).unsqueeze(0), Budget(5, 0.125), [0]) or []
    for h in range(KV_HEADS):
        assert sorted(set(found[h, 0].tolist())) == recalled_by_hand(zone, query_of(1), h)


def test_an_index_without_tokens_is_an_index() -> None:
    zone = Zone(CentroidConfig())
    assert isinstance(zone.index, CentroidIndex) and zone.index.lengths == [0] and zone.index.nbytes == 0
    zone.index.end_of_prompt(0, None, 0)
    assert zone.search(query_of(0), 3) == [[], []]

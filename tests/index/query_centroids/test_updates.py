"""How query centroids change: learned queries, later prompts, tokens that come after the lists, cropping and copies."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvrecall.core.structs import Budget
from kvrecall.index.query_centroids import CentroidConfig
from kvrecall.index.query_centroids.lists import CentroidLists
from tests.blocks import fork
from tests.index.query_centroids.zone import DIM, KV_HEADS, SCALING, Zone, prompt, query_of
from tests.strategies import SEEDS, examples, gaussian

FEW = CentroidConfig(max_centroids=4, tokens_per_centroid=4, list_tokens=6, recalled_centroids=2, pool_tokens=0)


def same(a: CentroidLists, b: CentroidLists) -> bool:
    names = ("queries", "norms", "lse", "ids", "scores")
    return a.head == b.head and all(torch.equal(getattr(a, name), getattr(b, name)) for name in names)


def candidates(zone: Zone, seed: int) -> list[set[int]]:
    (found,) = zone.index.candidates(query_of(seed).unsqueeze(0), Budget(5, SCALING), [0]) or []
    return [set(found[h, 0].tolist()) for h in range(KV_HEADS)]


def unique(lists: CentroidLists) -> bool:
    """Whether no list names a token twice."""
    rows = [[i for i in own if i >= 0] for own in lists.ids.flatten(0, 1).tolist()]
    return all(len(set(own)) == len(own) for own in rows)


def aligned(seed: int, size: float = 4.0) -> torch.Tensor:
    """Keys `[2, 1, D]` that a later query of that seed wants more than anything else, with all of its heads."""
    return size * query_of(seed).unflatten(0, (KV_HEADS, -1)).mean(1, keepdim=True)


def test_a_search_changes_nothing_until_it_is_learned() -> None:
    zone = prompt(FEW, 0, 60)
    before, first = zone.lists, zone.search(query_of(1), 5)
    assert zone.search(query_of(1), 5) == first and candidates(zone, 1) == candidates(zone, 1)
    assert zone.lists is before and same(before, prompt(FEW, 0, 60).lists)
    beside = zone.index.select([0])  # copies share the lists until one of them learns
    zone.index.after_attention([0])
    assert beside._lists[0] is before and same(before, prompt(FEW, 0, 60).lists)
    assert not same(zone.lists, before)
    after = zone.lists
    zone.index.after_attention([0])  # there is nothing new to learn
    assert zone.lists is after


def test_learned_queries_replace_the_oldest_in_turn() -> None:
    zone = prompt(FEW, 0, 60)
    original = zone.lists.copy()
    for number in range(9):
        slot, before = number % 4, zone.lists.copy()
        assert before.head == slot
        query = query_of(number)
        recalled = candidates(zone, number)
        zone.search(query, 3)
        zone.index.after_attention([0])
        now = zone.lists
        torch.testing.assert_close(now.queries[:, slot] * now.norms[:, slot, None], query)
        others = [c for c in range(4) if c != slot]
        assert torch.equal(now.ids[:, others], before.ids[:, others])
        assert torch.equal(now.queries[:, others], before.queries[:, others])
        for h in range(KV_HEADS):
            own = [i for i in now.ids[h, slot].tolist() if i >= 0]
            assert own == sorted(own) and len(own) == min(6, len(recalled[h])) and set(own) <= recalled[h]
    assert not torch.equal(zone.lists.queries, original.queries)


@pytest.mark.parametrize("where", ["host", "device"])
def test_a_learned_list_holds_the_best_of_what_was_reranked(where) -> None:
    """rho of them, not only the top_k; scores are log softmax over what was recalled, largest over the group."""
    config = CentroidConfig(max_centroids=4, tokens_per_centroid=4, list_tokens=6, recalled_centroids=3, rerank=where)
    zone = prompt(config, 0, 60)
    recalled, query = candidates(zone, 1), query_of(1)
    zone.search(query, 2)
    zone.index.after_attention([0])
    for h in range(KV_HEADS):
        ids = sorted(recalled[h])
        logits = query[3 * h : 3 * h + 3].double() @ zone.keys[h, ids].double().T * SCALING
        ranked = logits.log_softmax(-1).amax(0)
        best = ranked.argsort(descending=True)[:6].sort().values
        assert zone.lists.ids[h, 0].tolist() == [ids[i] for i in best]
        torch.testing.assert_close(zone.lists.scores[h, 0].double(), ranked[best], atol=0.02, rtol=0.01)
        torch.testing.assert_close(zone.lists.lse[3 * h : 3 * h + 3, 0].double(), logits.logsumexp(-1), atol=1e-5, rtol=1e-5)


def test_a_centroid_knows_what_was_excluded_when_it_was_learned() -> None:
    """Static tokens are attended anyway, but the next static set may leave them out."""
    config = CentroidConfig(max_centroids=4, tokens_per_centroid=4, list_tokens=20, recalled_centroids=1, pool_tokens=0)
    zone = prompt(config, 0, 60)
    recalled = candidates(zone, 1)
    excluded = torch.tensor([sorted(own - {-1})[:5] for own in recalled], dtype=torch.int32)
    zone.index.exclude(0, excluded)
    found = zone.search(query_of(1), 20)
    zone.index.after_attention([0])
    for h in range(KV_HEADS):
        assert not set(found[h]) & set(excluded[h].tolist())
        assert set(excluded[h].tolist()) <= set(zone.lists.ids[h, 0].tolist())


def test_fewer_than_rho_are_padded() -> None:
    config = CentroidConfig(max_centroids=4, tokens_per_centroid=4, list_tokens=20, recalled_centroids=1, pool_tokens=0)
    zone = prompt(config, 0, 60)
    zone.index.truncate(0, 10)  # few are left of every list
    recalled = candidates(zone, 1)
    zone.search(query_of(1), 3)
    zone.index.after_attention([0])
    for h in range(KV_HEADS):
        left = sorted(recalled[h] - {-1})
        assert len(left) < 20 and zone.lists.ids[h, 0].tolist() == left + [-1] * (20 - len(left))
        assert (zone.lists.scores[h, 0, len(left) :] == float("-inf")).all()
    zone.search(query_of(1), 3)  # padded lists can be searched, and learned from
    zone.index.after_attention([0])
    assert torch.isfinite(zone.lists.queries).all() and not zone.lists.lse.isnan().any()


@pytest.mark.parametrize("update", [True, False])
def test_a_like_query_meets_the_learned_one(update: bool) -> None:
    """Queries that drift away from the prompt stay near a centroid; without the update they do not."""
    zone = prompt(CentroidConfig(max_centroids=4, list_tokens=6, pool_tokens=0, dynamic_update=update), 0, 60)
    before = zone.lists
    zone.search(query_of(1), 3)
    zone.index.after_attention([0])
    assert same(zone.lists, before) != update
    like = torch.nn.functional.normalize(query_of(1) + 0.1 * query_of(2), dim=-1)
    cosines = torch.einsum("hcd,hd->hc", zone.lists.queries, like).amax(1)
    assert (cosines > 0.9).all() if update else (cosines < 0.9).all()


def test_tokens_behind_the_lists_are_recalled_by_every_search() -> None:
    config = CentroidConfig(max_centroids=4, list_tokens=6, recalled_centroids=1, pool_tokens=10)
    zone = prompt(config, 0, 60)
    for number in range(10):
        zone.add(gaussian(number + 9, KV_HEADS, 1, DIM))
        assert all(set(range(60, 61 + number)) <= recalled for recalled in candidates(zone, number))
    assert zone.lists.ids.max() < 60 and zone.index.lengths == [70]
    zone.add(gaussian(50, KV_HEADS, 3, DIM))
    for number in range(5):
        recalled = candidates(zone, number)
        assert all(set(range(63, 73)) <= own for own in recalled)  # the newest ten still are


@pytest.mark.parametrize("pool", [0, 1, 7])
def test_a_token_is_found_before_and_after_its_absorption(pool: int) -> None:
    config = CentroidConfig(max_centroids=4, list_tokens=12, recalled_centroids=2, pool_tokens=pool)
    zone = prompt(config, 0, 60)
    zone.add(aligned(5))
    assert all(60 in found for found in zone.search(query_of(5), 3))
    zone.add(gaussian(9, KV_HEADS, pool + 2, DIM), at_once=1)
    assert zone.index._listed[0] == 63 and (zone.lists.ids == 60).any(-1).any(-1).all()
    assert all(60 in found for found in zone.search(query_of(5), 3))


@examples(20)
@given(
    seed=SEEDS, pool=st.sampled_from([0, 3, 8]), arrivals=st.lists(st.sampled_from([1, 2, 9]), min_size=1, max_size=8),
    rho=st.sampled_from([4, 20]),
)  # fmt: skip
def test_no_list_names_a_token_twice(seed: int, pool: int, arrivals: list[int], rho: int) -> None:
    """What a learned query lists of the pool must not come to its list again when the pool is absorbed."""
    config = CentroidConfig(max_centroids=4, list_tokens=rho, recalled_centroids=2, pool_tokens=pool)
    zone = prompt(config, seed, 40)
    for number, count in enumerate(arrivals):
        zone.add(gaussian(seed + number, KV_HEADS, count, DIM))
        zone.search(query_of(number), 3)
        zone.index.after_attention([0])
        assert unique(zone.lists)


def test_a_later_prompt_lists_no_token_twice() -> None:
    """Its queries list the pool's tokens; absorbing the pool must not list them again."""
    zone = prompt(CentroidConfig(max_centroids=4, list_tokens=12, recalled_centroids=2, pool_tokens=8), 0, 60)
    zone.add(gaussian(8, KV_HEADS, 6, DIM))
    zone.observe(gaussian(9, 6, 3, DIM), 70)
    zone.add(gaussian(10, KV_HEADS, 12, DIM))
    assert unique(zone.lists)


@pytest.mark.parametrize("update", [True, False])
def test_a_second_prompt_replaces_the_oldest_only_with_dynamic_update(update: bool) -> None:
    config = CentroidConfig(max_centroids=8, tokens_per_centroid=4, list_tokens=6, pool_tokens=4, dynamic_update=update)
    zone = prompt(config, 0, 60)
    before = zone.lists
    zone.add(gaussian(7, KV_HEADS, 20, DIM))
    grown = zone.lists
    queries = gaussian(8, 6, 3, DIM)
    zone.observe(queries, 77)
    if not update:
        assert zone.lists is grown
        return
    assert zone.lists.head == 3 and zone.lists.queries.shape == before.queries.shape
    torch.testing.assert_close(zone.lists.queries[:, :3] * zone.lists.norms[:, :3, None], queries)
    assert torch.equal(zone.lists.queries[:, 3:], before.queries[:, 3:])
    assert torch.equal(zone.lists.ids[:, 3:], grown.ids[:, 3:])


def test_a_long_second_prompt_replaces_all_of_them() -> None:
    zone = prompt(CentroidConfig(max_centroids=8, tokens_per_centroid=4, list_tokens=6, pool_tokens=4), 0, 60)
    zone.add(gaussian(7, KV_HEADS, 40, DIM))
    queries = gaussian(8, 6, 30, DIM)
    zone.observe(queries, 70)
    assert zone.lists.head == 0 and zone.lists.queries.shape[1] == 8
    torch.testing.assert_close(zone.lists.queries * zone.lists.norms.unsqueeze(-1), queries[:, -8:])


def test_the_number_of_centroids_grows_with_the_prompt() -> None:
    config = CentroidConfig(max_centroids=8, tokens_per_centroid=16)
    assert [config.centroids(n) for n in (1, 15, 16, 47, 48, 127, 128, 100_000)] == [1, 1, 1, 2, 3, 7, 8, 8]
    assert CentroidConfig().centroids(10_000) == 625 and CentroidConfig().centroids(100_000) == 2048
    assert prompt(config, 0, 48).lists.queries.shape[1] == 3
    assert config.observed_queries == 8


def test_the_centroids_are_the_last_queries() -> None:
    zone = prompt(FEW, 0, 60)
    torch.testing.assert_close(zone.lists.queries * zone.lists.norms.unsqueeze(-1), gaussian(1, 6, 20, DIM)[:, -4:])


@pytest.mark.parametrize("left", [0, 1, 30, 60, 64])
def test_cropped_tokens_are_never_found_again(left: int) -> None:
    zone = prompt(CentroidConfig(max_centroids=4, list_tokens=20, recalled_centroids=2, pool_tokens=6), 0, 60)
    zone.add(gaussian(7, KV_HEADS, 4, DIM))
    zone.search(query_of(1), 4)
    zone.pool.truncate(left)
    zone.index.truncate(0, left)
    zone.index.after_attention([0])  # what was searched before no longer counts
    assert zone.index.lengths == [left]
    if not left:  # nothing is left of that conversation: the next prompt makes its own lists
        assert zone.index.nbytes == 0
        return
    assert zone.lists.ids.max() < left
    assert all(i < left for own in zone.search(query_of(1), 500) for i in own)
    zone.add(aligned(3))
    zone.add(gaussian(8, KV_HEADS, 20, DIM))
    for number in (3, 4):
        found = zone.search(query_of(number), 5)
        assert all(own and own[-1] < left + 21 for own in found)
        assert number != 3 or all(left in own for own in found)


def test_cropping_to_more_than_there_is_does_nothing() -> None:
    zone = prompt(FEW, 0, 60)
    before = zone.lists
    zone.index.truncate(0, 60)
    zone.index.truncate(0, 100)
    assert zone.lists is before and zone.index.lengths == [60]


def test_copies_go_their_own_ways() -> None:
    zone = prompt(CentroidConfig(max_centroids=4, list_tokens=6, recalled_centroids=2, pool_tokens=3), 0, 60)
    zone.search(query_of(1), 4)
    copies = zone.index.select([0, 0])
    copies.bind([fork(zone.pool), fork(zone.pool)])
    before, first = zone.lists, zone.search(query_of(2), 4)
    copies.after_attention([0, 1])  # a copy has not searched yet
    copied = copies._lists[0]
    assert copied is not None and same(copied, before)
    both = copies.search(query_of(2).expand(2, -1, -1), Budget(4, SCALING), [0, 1])
    assert both.ids[0].tolist() == both.ids[1].tolist() == first
    copies.after_attention([1])
    copies.exclude(0, torch.tensor(first, dtype=torch.int32))
    copies.truncate(1, 20)
    assert copies.lengths == [60, 20] and zone.index.lengths == [60]
    assert zone.lists is before and zone.search(query_of(2), 4) == first
    zone.add(gaussian(7, KV_HEADS, 9, DIM))
    assert copies.lengths == [60, 20] and same(copied, copies._lists[0] or before)

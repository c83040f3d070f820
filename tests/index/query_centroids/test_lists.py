"""The inverted lists of query centroids against Algorithm 1 written as loops: build, absorb, FIFO ring, truncate, nearest."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvrecall.index.query_centroids import lists as ivf
from kvrecall.index.query_centroids.lists import CentroidLists
from kvrecall.select.queries import ObservedQueries, QueryLog
from tests.strategies import SEEDS, examples, gaussian, whole_numbers

SCALING = 0.5  # with whole numbers every score is exact, and ties are frequent


def observe(seed: int, heads: int, count: int, start: int, dim: int = 8) -> ObservedQueries:
    """Whole-numbered queries, none of them zero, each with an lse of its own."""
    queries = whole_numbers(seed, heads, count, dim)
    queries[..., 0] += torch.where(queries.abs().sum(-1) == 0, 1.0, 0.0)
    return ObservedQueries(queries, whole_numbers(seed + 1, heads, count, most=9), start)


def test_centroids_are_rows_however_the_queries_lie() -> None:
    """A model's queries `[H_q, T, D]` are often a view of `[T, H_q, D]`; kernels read centroids row after row."""
    seen = observe(1, 4, 6, 40)
    view = replace(seen, queries=seen.queries.transpose(0, 1).contiguous().transpose(0, 1))
    assert view.queries.stride() != seen.queries.stride()
    keys = whole_numbers(3, 2, 40, 8).float()
    made, expected = (ivf.build(x, keys, 4, 5, SCALING) for x in (view, seen))
    assert made.queries.is_contiguous() and torch.equal(made.queries, expected.queries) and torch.equal(made.ids, expected.ids)
    log = QueryLog(1, 6)
    log.add(0, view.queries, view.lse, 40)
    kept = log.seen(0)
    assert kept is not None and kept.queries.is_contiguous() and torch.equal(kept.queries, seen.queries)


def score(query: Tensor, lse: Tensor, keys: Tensor, group: int, head: int, centroid: int, token: int) -> float:
    """Largest over the group of log softmax(q k)."""
    found = []
    for g in range(group):
        of = head * group + g
        product = sum(a * b for a, b in zip(query[of, centroid].tolist(), keys[head, token].tolist(), strict=True))
        found.append(product * SCALING - float(lse[of, centroid]))
    return max(found)


def best(scored: list[tuple[float, int]], k: int) -> list[int]:
    """Places of the k largest scores, ties to the lower place, ascending."""
    return sorted(place for _, place in sorted(scored, key=lambda x: (-x[0], x[1]))[:k])


def half(value: float) -> float:
    """Rounded to bfloat16."""
    return float(torch.tensor(value).to(torch.bfloat16))


def pairs(lists: CentroidLists, head: int, centroid: int) -> list[tuple[int, float]]:
    """(id, score) of one list, padding included."""
    return list(zip(lists.ids[head, centroid].tolist(), lists.scores[head, centroid].float().tolist(), strict=True))


@examples(40)
@given(
    seed=SEEDS, kv_heads=st.integers(1, 3), group=st.sampled_from([1, 3, 8]), count=st.integers(1, 9),
    tokens=st.sampled_from([1, 2, 7, 40]), rho=st.sampled_from([1, 3, 10, 50]), offset=st.integers(0, 5),
    behind=st.integers(-5, 50),
)  # fmt: skip
def test_build_is_algorithm_1(
    seed: int, kv_heads: int, group: int, count: int, tokens: int, rho: int, offset: int, behind: int
) -> None:
    start = max(0, offset + behind)
    seen, keys = observe(seed, kv_heads * group, count, start), whole_numbers(seed + 2, kv_heads, tokens, 8)
    made = ivf.build(seen, keys, offset, rho, SCALING)
    assert made.ids.shape == made.scores.shape == (kv_heads, count, rho)
    assert made.ids.dtype == torch.int32 and made.scores.dtype == torch.bfloat16
    for h in range(kv_heads):
        for c in range(count):
            scored = [
                (score(seen.queries, seen.lse, keys, group, h, c, t) if offset + t <= start + c else float("-inf"), t)
                for t in range(tokens)
            ]
            kept = best(scored, rho)
            expected = [(t, half(scored[t][0])) for t in kept] + [(-1, float("-inf"))] * (rho - len(kept))
            assert pairs(made, h, c) == expected


@pytest.mark.parametrize("logits", [1, 1 << 20])
def test_without_a_mask_a_list_is_of_all_keys(logits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The softmax of Algorithm 1 as it is written. Its sum has the keys that the query saw, and those behind it."""
    monkeypatch.setattr(ivf, "_LOGITS", logits)
    queries, keys, start = gaussian(3, 6, 7, 8), gaussian(4, 2, 40, 8), 20
    products = (queries.unflatten(0, (2, 3)) @ keys.transpose(-1, -2).unsqueeze(1)).flatten(0, 1) * SCALING
    seen = torch.arange(40) <= torch.arange(start, start + 7).unsqueeze(1)
    observed = ObservedQueries(queries, products.masked_fill(~seen, float("-inf")).logsumexp(-1), start)
    made = ivf.build(observed, keys, 0, 10, SCALING, causal=False)
    scores = products.log_softmax(-1).unflatten(0, (2, 3)).amax(1)
    assert torch.equal(made.ids.long(), scores.topk(10).indices.sort().values)
    torch.testing.assert_close(made.scores.float(), scores.gather(-1, made.ids.long()), rtol=0.01, atol=0)
    torch.testing.assert_close(made.lse, products.logsumexp(-1))
    masked = ivf.build(observed, keys, 0, 10, SCALING)
    assert (made.ids > start + 6).any() and not (masked.ids > start + 6).any()


def test_build_keeps_directions_lengths_and_lse() -> None:
    queries = (3 * gaussian(0, 6, 5, 64)).to(torch.bfloat16)
    made = ivf.build(ObservedQueries(queries, gaussian(1, 6, 5), 10), gaussian(2, 2, 9, 64), 0, 4, 0.125)
    assert made.queries.dtype == torch.bfloat16 and made.norms.dtype == made.lse.dtype == torch.float32
    torch.testing.assert_close(made.queries.float().norm(dim=-1), torch.ones(6, 5), atol=0.01, rtol=0)
    torch.testing.assert_close(made.norms, queries.float().norm(dim=-1))
    torch.testing.assert_close(made.queries.float() * made.norms.unsqueeze(-1), queries.float(), atol=0.02, rtol=0.01)
    assert torch.equal(made.lse, gaussian(1, 6, 5)) and made.head == 0


def test_a_query_of_zeros_gives_a_finite_centroid() -> None:
    made = ivf.build(ObservedQueries(torch.zeros(2, 3, 8), torch.zeros(2, 3), 9), gaussian(0, 1, 5, 8), 0, 2, SCALING)
    assert torch.isfinite(made.queries).all() and made.ids.tolist() == [[[0, 1]] * 3]


@pytest.mark.parametrize("logits", [1, 500, 1300])
def test_blocks_change_nothing(logits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, keys = observe(0, 6, 11, 12), whole_numbers(1, 2, 40, 8)
    whole = ivf.build(seen, keys, 4, 6, SCALING)
    monkeypatch.setattr(ivf, "_LOGITS", logits)
    parts = ivf.build(seen, keys, 4, 6, SCALING)
    assert torch.equal(parts.ids, whole.ids) and torch.equal(parts.scores, whole.scores)


@examples(40)
@given(
    seed=SEEDS, group=st.sampled_from([1, 3, 8]), tokens=st.sampled_from([1, 3, 20]), rho=st.sampled_from([1, 4, 12, 40]),
    more=st.sampled_from([1, 5, 30]), start=st.sampled_from([0, 8, 100]),
)  # fmt: skip
def test_absorb_keeps_the_best_of_old_and_new(seed: int, group: int, tokens: int, rho: int, more: int, start: int) -> None:
    """Scores are compared as the lists hold them, in bfloat16; lse is that of the centroid."""
    seen, keys = observe(seed, 2 * group, 5, start), whole_numbers(seed + 2, 2, tokens + more, 8)
    made = ivf.build(seen, keys[:, :tokens], 0, rho, SCALING)
    lengths = 2.0 ** whole_numbers(seed + 3, *made.norms.shape, most=2)  # exact products of direction and length
    made = replace(made, queries=seen.queries, norms=lengths, head=3)
    after = ivf.absorb(made, keys[:, tokens:], tokens, SCALING)
    scaled = seen.queries * lengths.unsqueeze(-1)
    for h in range(2):
        for c in range(5):
            old = pairs(made, h, c)
            new = [(t, half(score(scaled, seen.lse, keys, group, h, c, t))) for t in range(tokens, tokens + more)]
            both = old + new
            kept = [both[place] for place in best([(s, place) for place, (_, s) in enumerate(both)], rho)]
            kept.sort(key=lambda x: (x[0] < 0, x[0]))
            assert pairs(after, h, c) == kept
    assert after.head == 3 and torch.equal(after.queries, made.queries) and torch.equal(after.lse, made.lse)
    assert after.ids.dtype == torch.int32 and after.scores.dtype == torch.bfloat16


def labelled(labels: list[int]) -> CentroidLists:
    """Centroids whose every number says which they are."""
    values = torch.tensor(labels, dtype=torch.float32)
    ids = values.to(torch.int32).view(1, -1, 1).expand(2, -1, 3)
    return CentroidLists(
        values.view(1, -1, 1).expand(4, -1, 8), values.expand(4, -1), values.expand(4, -1), ids, ids.to(torch.bfloat16)
    )


def in_order(lists: CentroidLists) -> list[int]:
    """Labels, oldest first."""
    labels = lists.lse[0].long().tolist()
    for tensor in (lists.queries, lists.norms, lists.lse, lists.ids, lists.scores):
        assert (
            (tensor.flatten(2) if tensor.dim() > 2 else tensor.unsqueeze(-1))
            .long()
            .eq(torch.tensor(labels).view(1, -1, 1))
            .all()
        )
    return labels[lists.head :] + labels[: lists.head]


@examples(30)
@given(count=st.integers(1, 6), arrivals=st.lists(st.integers(1, 6), max_size=8))
def test_replacing_the_oldest_is_a_queue(count: int, arrivals: list[int]) -> None:
    lists, queue, stamp = labelled(list(range(count))).copy(), list(range(count)), count
    for arriving in (min(a, count) for a in arrivals):
        labels = list(range(stamp, stamp + arriving))
        changed = ivf.replace_oldest(lists, labelled(labels))
        lists, queue, stamp = changed, queue[arriving:] + labels, stamp + arriving
        assert in_order(lists) == queue


@examples(20)
@given(seed=SEEDS, left=st.integers(0, 45))
def test_truncate_drops_later_ids_only(seed: int, left: int) -> None:
    made = replace(ivf.build(observe(seed, 6, 5, 60), whole_numbers(seed, 2, 40, 8), 0, 12, SCALING), head=2)
    after = ivf.truncate(made, left)
    assert after.head == 2 and after.ids.shape == made.ids.shape and after.scores.dtype == torch.bfloat16
    for h in range(2):
        for c in range(5):
            kept = [pair for pair in pairs(made, h, c) if pair[0] < left]
            assert pairs(after, h, c) == kept + [(-1, float("-inf"))] * (12 - len(kept))


@examples(30)
@given(
    seed=SEEDS, kv_heads=st.integers(1, 3), group=st.sampled_from([1, 3, 8]), centroids=st.sampled_from([1, 5, 30]),
    count=st.sampled_from([1, 4, 40]), dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)  # fmt: skip
def test_nearest_is_the_largest_cosine_of_the_group(
    seed: int, kv_heads: int, group: int, centroids: int, count: int, dtype: torch.dtype
) -> None:
    seen = ObservedQueries(
        gaussian(seed, kv_heads * group, centroids, 64).to(dtype), torch.zeros(kv_heads * group, centroids), 9
    )
    made = ivf.build(seen, gaussian(0, kv_heads, 4, 64), 0, 2, 0.125)
    queries = (5 * gaussian(seed + 1, kv_heads * group, 64)).to(dtype)
    near = ivf.nearest(made, ivf.directions(queries)[0], kv_heads, count)
    for h in range(kv_heads):
        cosines = []
        for c in range(centroids):
            own = range(h * group, (h + 1) * group)
            directions = [(made.queries[g, c].double(), queries[g].double()) for g in own]
            cosines.append((max(float(a @ b / b.norm()) for a, b in directions), c))
        assert near[h].tolist() == best(cosines, count)


def test_nearest_prefers_the_lower_of_equals() -> None:
    """Directions along the axes: equal cosines are equal in every bit."""
    axes = torch.eye(8)[torch.tensor([3, 1, 1, 0, 1, 3])].unsqueeze(0)
    lists = replace(labelled([0] * 6), queries=axes.expand(2, -1, -1))
    query, _ = ivf.directions(torch.tensor([0.5, 2.0, 0, 1.0, 0, 0, 0, 0]).expand(2, 8))
    assert ivf.nearest(lists, query, 1, 2).tolist() == [[1, 2]]
    assert ivf.nearest(lists, query, 1, 4).tolist() == [[0, 1, 2, 4]]

"""H2O against sums of attention written as loops; dropped rows stay on the host, and nothing looks at them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kvrecall.baselines.h2o import AccumulatedIndex
from kvrecall.index.wrapper import IndexWrapper
from kvrecall.layer.pipeline import decode_step, prefill_layer
from kvrecall.layer.state import LayerState
from kvrecall.methods import Full
from tests.baselines.course import Course, best
from tests.baselines.small import small
from tests.one_layer import layer, normal, params


def naive_sums(course: Course, attended: Callable[[int, int, int], list[int]], upto: int) -> Tensor:
    """Attention `[6, upto]` that queries 0 .. upto - 1 gave, each over attended(head, t, position of the query)."""
    sums = torch.zeros(6, upto, dtype=torch.float64)
    for g in range(6):
        for t in range(upto):
            at = attended(g, t, upto)
            logits = course.keys[g // 3, at].double() @ course.queries[g, t].double() * course.dim**-0.5
            sums[g, at] += logits.softmax(0)
    return sums


@pytest.mark.parametrize(("gqa", "dim"), [(None, 64), ("per_head", 64), ("mean_q", 80)])
def test_h2o_keeps_the_tokens_that_were_attended_most_and_never_takes_one_back(gqa: str | None, dim: int) -> None:
    course = Course(small("h2o", top_k=9, gqa=gqa), length=70, dim=dim)
    sums, left = naive_sums(course, lambda g, t, n: list(range(t + 1)), 70), [list(range(46)) for _ in range(6)]
    known = 0
    for _ in range(24):
        out = course.step()
        zone = course.zone
        for g in range(6):
            left[g] = [i for i in left[g] if i < known] + list(range(known, zone))
        known, kept = zone, [[] for _ in range(6)]
        for g in range(6):
            score = sums[g] if gqa == "per_head" else sums[3 * (g // 3) : 3 * (g // 3) + 3].sum(0)
            ranks = [float(score[course.sink + i]) for i in left[g]]
            kept[g] = [left[g][at] for at in best(ranks, 9)]
        left = kept
        wanted = [sorted(set().union(*left[3 * h : 3 * h + 3])) for h in range(2)]
        assert course.found() == wanted
        torch.testing.assert_close(out, course.expected(wanted), atol=1e-5, rtol=1e-5)
        total = course.keys.shape[1]
        sums = torch.nn.functional.pad(sums, (0, total - sums.shape[1]))
        for g in range(6):
            at = [*range(course.sink), *(course.sink + i for i in wanted[g // 3]), *range(course.sink + zone, total)]
            logits = course.keys[g // 3, at].double() @ course.queries[g, -1].double() * dim**-0.5
            sums[g, at] += logits.softmax(0)
    stored = torch.cat([b[:, :, 0] for b in course.state.store.blocks(0)], 1)
    assert torch.equal(stored, course.keys)  # dropped rows are still there, and not looked at


def test_h2o_counts_the_same_in_any_chunks() -> None:
    whole, cut = (layer(small("h2o", top_k=9)) for _ in range(2))
    q, k, v = (normal(1, h, 90, 64, seed=h) for h in (6, 2, 2))
    prefill_layer(whole, q, k, v, None, params())
    for at in (slice(0, 13), slice(13, 70), slice(70, 90)):
        prefill_layer(cut, q[:, :, at], k[:, :, at], v[:, :, at], None, params())
    assert isinstance(whole.index, AccumulatedIndex) and isinstance(cut.index, AccumulatedIndex)
    sums = whole.index._sums.view(0)
    torch.testing.assert_close(sums, cut.index._sums.view(0), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(sums.sum(1), torch.full((2, 3), 90.0), atol=1e-3, rtol=1e-5)  # each query gives one in all


@pytest.mark.parametrize("changes", [
    {"prune": "top-p:p=0.5"}, {"trigger": "fixed-stride:steps=4"}, {"prune": "top-p:p=0.5", "gqa": "per_head"}, {},
])  # fmt: skip
def test_h2o_counts_what_was_attended_and_nothing_else(changes: dict[str, str]) -> None:
    """Every query gives one in all, to what it attended to."""
    course = Course(small("h2o", top_k=20, **changes))
    for _ in range(15):
        course.step()
        index = course.state.index
        while not isinstance(index, AccumulatedIndex):
            assert isinstance(index, IndexWrapper)
            index = index.base
        before = index._sums.view(0).sum(1)
        torch.testing.assert_close(before, torch.full((2, 3), float(course.keys.shape[1])), atol=1e-3, rtol=1e-5)


def test_attention_is_counted_under_a_pruning_too() -> None:
    plain, pruned = (Course(small("h2o", top_k=9, prune=prune)) for prune in (None, "top-p:p=1"))
    for _ in range(6):
        torch.testing.assert_close(plain.step(), pruned.step())
        assert plain.found() == pruned.found()


def test_a_fork_knows_the_attention_of_the_queries_that_were_observed() -> None:
    """A document is read once under full attention; H2O then judges by the remembered queries, as if it had read it itself."""
    method = small("h2o", top_k=9)
    full = Full(**{name: getattr(method, name) for name in ("sink_tokens", "local_tokens", "update_interval")})
    prompt = [normal(h, 90, 64, seed=i)[None] for i, h in enumerate((6, 2, 2))]
    own, read = layer(method), LayerState(0, layer(method).shape, full, observe_queries=200)
    for state in (own, read):
        prefill_layer(state, prompt[0], prompt[1], prompt[2], None, params())
    fork = read.fork(method)
    for number in range(12):
        token = [normal(h, 1, 64, seed=100 + 3 * number + i)[None] for i, h in enumerate((6, 2, 2))]
        outs = [decode_step(state, token[0], token[1], token[2], None, params()) for state in (own, fork)]
        torch.testing.assert_close(outs[0], outs[1], atol=1e-5, rtol=1e-5)
        assert torch.equal(own.attended_ids(0), fork.attended_ids(0))
    assert own.attended_ids(0).tolist() != [list(range(9))] * 2

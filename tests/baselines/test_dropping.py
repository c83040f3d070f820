"""Methods that drop tokens in their papers, against their own selections written as loops; here the rows stay on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kvrecall import methods
from kvrecall.baselines.h2o.index import AccumulatedIndex
from kvrecall.baselines.raas.index import MilestoneIndex
from kvrecall.core.errors import CompositionError, ParameterError
from kvrecall.index.around import IndexAround
from kvrecall.layer.pipeline import decode_step, prefill_layer
from kvrecall.layer.state import LayerState
from kvrecall.methods import Full, Method
from kvrecall.static.choice import ObservationWindow
from tests.baselines.small import Course, best, small
from tests.one_layer import layer, normal, params


def resident_plus(course: Course, zone: list[list[int]], out: torch.Tensor) -> None:
    assert course.found() == zone
    torch.testing.assert_close(out, course.expected(zone), atol=1e-5, rtol=1e-5)


def test_streaming_attends_to_sink_and_window_only() -> None:
    course = Course(small("streaming"))
    for _ in range(12):
        out = course.step()
        assert course.zone > 60
        resident_plus(course, [[], []], out)
    stats = course.state.stats
    assert stats.retrieved_tokens == stats.bytes_fetched == 0
    assert 4 + 16 < stats.attended_per_step <= 4 + 16 + 8
    stored = torch.cat([b[:, :, 0] for b in course.state.store.blocks(0)], 1)
    assert torch.equal(stored, course.keys)  # nothing was evicted


def test_streaming_attends_to_everything_that_fits_the_window() -> None:
    course = Course(small("streaming", full_attention_threshold=2000), length=10)
    for _ in range(10):
        out = course.step()
        torch.testing.assert_close(out, course.expected([[], []]), atol=1e-5, rtol=1e-5)
        assert course.zone == 0


def snap(course: Course, queries: int, count: int, pool: int, before: int) -> list[list[int]]:
    """SnapKV's choice for the last `queries` of all tokens but the last `before`, in loops."""
    total, found = course.keys.shape[1] - before, []
    for h in range(2):
        keys, score = course.keys[h, :total].double(), [0.0] * course.zone
        for g in range(3):
            for t in range(total - queries, total):
                logits = keys[: t + 1] @ course.queries[3 * h + g, t].double() * course.dim**-0.5
                for i, share in enumerate(logits.softmax(0)[course.sink : course.sink + course.zone].tolist()):
                    score[i] += share
        pooled = [sum(score[max(0, i - pool) : i + pool + 1]) for i in range(len(score))]
        found.append(best(pooled, count))
    return found


@pytest.mark.parametrize(("pool", "dim"), [(0, 64), (2, 64), (3, 80)])
def test_snapkv_is_chosen_once_by_the_prompts_last_queries(pool: int, dim: int) -> None:
    course, chosen = Course(small("snapkv", top_k=9, pool_radius=pool), dim=dim), [[-1]]
    for number in range(20):
        out = course.step()
        if not number:
            chosen = snap(course, 8, 9, pool, before=1)
        resident_plus(course, chosen, out)
    assert course.zone > 70 and course.state.stats.searches == 0


def test_snapkv_keeps_what_was_generated_until_the_buffer_is_full() -> None:
    course = Course(small("snapkv", top_k=9, update_interval=64))
    for _ in range(40):
        course.step()
    assert course.zone == 70  # the prompt's, less sink and window: all generated tokens are resident


def test_pooling_decides() -> None:
    plain, wide = (Course(small("snapkv", top_k=9, pool_radius=radius)) for radius in (0, 2))
    plain.step()
    wide.step()
    assert plain.found() != wide.found()


def test_snapkv_plus_chooses_anew_from_all_tokens() -> None:
    course, chosen, choices = Course(small("snapkv+", top_k=9, refresh_interval=5)), [[-1]], []
    for number in range(40):
        out = course.step()
        if number % 5 == 0:
            chosen = snap(course, 8, 9, 2, before=1)
            choices.append(chosen)
        resident_plus(course, chosen, out)
    assert len(set(map(str, choices))) == 8
    assert any(token >= 70 for choice in choices for row in choice for token in row)  # generated tokens are judged too


def test_equal_neighbourhoods_go_to_the_lowest() -> None:
    from kvrecall.static.choice import pooled

    scores = torch.tensor([[0.1, 0.7, 0.3] * 40])
    made = pooled(scores, 1)
    assert torch.equal(made[0, 1:-1], made[0, 1:2].expand(118)) and made[0, 0] < made[0, 1]
    assert torch.equal(pooled(scores, 0), scores)


@pytest.mark.parametrize("name", ["streaming", "snapkv", "snapkv+"])
def test_dropping_methods_never_search_in_an_index(name: str) -> None:
    index = small(name).build_index(Course(small(name), length=3).state.shape)
    assert index is not None
    index.append(0, normal(2, 50, 64))
    assert index.lengths == [50] and index.nbytes == 0
    index.truncate(0, 20)
    assert index.lengths == [20] and index.select([0, 0]).lengths == [20, 20]


@pytest.mark.parametrize(("name", "changes", "says"), [
    ("streaming", {"top_k": 100}, "top_k: expected 0, got 100. Streaming retrieves nothing"),
    ("streaming", {"top_k": -1}, "top_k: expected an integer >= 0"),
    ("snapkv", {"pool_radius": -1}, "pool_radius: expected an integer >= 0"),
    ("snapkv", {"top_k": 0}, "top_k: expected an integer > 0"),
    ("snapkv+", {"refresh_interval": None}, "refresh_interval: expected an integer >= 1, got None. Use SnapKV"),
])  # fmt: skip
def test_impossible_parameters(name: str, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ParameterError, match=says):
        methods.get(name, **changes)


def test_a_set_chosen_once_may_be_composed() -> None:
    static = "observation-window:interval=null,page_tokens=4,pool_radius=2"
    method = Method(index="pages:page_tokens=4", static=static, top_k=64)
    assert method.static_config() == ObservationWindow(interval=None, pool_radius=2, page_tokens=4)
    assert str(method.static) == static


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


@pytest.mark.parametrize(("gqa", "keep"), [(None, True), (None, False), ("per_head", False)])
def test_raas_drops_the_pages_that_were_not_stamped_for_longest(gqa: str | None, keep: bool) -> None:
    length, top_k = (30, 32) if keep else (70, 14)
    course = Course(small("raas", top_k=top_k, gqa=gqa, keep_prompt=keep, update_interval=4), length=length)
    prompt, sets = length - 4, 3 if gqa else 1  # what is in the window when decoding begins included
    times: list[dict[int, int]] = [{} for _ in range(2 * sets)]
    known, step, dropped = 0, 1, set()
    for _ in range(60 if keep else 30):
        out, zone, wanted = course.step(), course.zone, []
        pages = [list(range(i, min(i + 3, zone))) for i in range(0, zone, 3)]
        if not course.state.held:
            continue  # attended whole as long as nothing has been searched for
        for at, stamps in enumerate(times):
            h = at // sets
            queries = course.query(h)[at % sets : at % sets + 1] if gqa else course.query(h)
            for number in range(known // 3, len(pages)):
                stamps[number] = step
            keys = course.zone_keys()[h]
            bounds = [[float(torch.maximum(q * keys[p].amax(0), q * keys[p].amin(0)).sum()) for p in pages] for q in queries]
            shares = (torch.tensor(bounds, dtype=torch.float64) / 8).softmax(-1).mean(0).tolist()
            order = sorted(stamps, key=lambda p: (-shares[p], p))
            for number in order[: -(-len(order) // 2)]:
                stamps[number] = step
            first = -(-prompt // 3) if keep and prompt <= top_k else 0
            turn = sorted(stamps, key=lambda p: (p >= first, -stamps[p] if p >= first else 0, -shares[p], p))
            ids: list[int] = []
            for number in turn:
                taken = pages[number][: top_k - len(ids)]
                ids += taken
                if not taken:
                    dropped.add((at, number))
                    del stamps[number]
            wanted.append(sorted(ids))
        known, step = zone, step + 1
        wanted = [sorted(set().union(*wanted[h * sets : h * sets + sets])) for h in range(2)]
        assert course.found() == wanted
        torch.testing.assert_close(out, course.expected(wanted), atol=1e-5, rtol=1e-5)
    assert len(dropped) > 4
    if keep:
        assert all(set(range(prompt)) <= set(row) for row in course.found())


def test_raas_keeps_every_prompt_of_a_conversation_and_drops_the_answers_between() -> None:
    course = Course(small("raas", top_k=48, update_interval=4), length=24)
    for _ in range(60):
        course.step()
    begin = course.keys.shape[1]
    course.read(20)
    for _ in range(60):
        course.step()
    prompts = {*range(24 - course.sink), *range(begin - course.sink, begin + 20 - course.sink)}
    answers = {*range(24 - course.sink, begin - course.sink)}
    for row in course.found():
        assert prompts <= set(row) and len(answers - set(row)) > 40
    fork = course.state.fork(small("raas", top_k=48, update_interval=4, stamp_ratio=0.25))  # reads all of it as one prompt
    assert isinstance(fork.index, MilestoneIndex)
    fork.end_prompts([0])
    assert fork.index._prompts == [[(0, course.keys.shape[1] - 1 - course.sink)]]


def test_raas_keeps_prompts_that_begin_within_pages_as_long_as_the_pages_fit() -> None:
    course, found = Course(small("raas", top_k=40, update_interval=4), length=24), []
    prompts = set(range(24 - course.sink))
    for _ in range(6):
        for _ in range(26):
            course.step()
        pages = {token // 3 for token in prompts}
        if course.state.held:  # else all is attended to
            kept = all(prompts <= set(row) for row in course.found())
            found.append((3 * len(pages), len(prompts), kept))
        begin = course.keys.shape[1] - course.sink
        prompts |= set(range(begin, begin + 4))
        course.read(4)
    assert all(kept == (room <= 40) for room, _, kept in found)
    assert any(tokens <= 40 < room for room, tokens, _ in found) and sum(kept for *_, kept in found) > 1


def test_raas_knows_where_a_prompt_begins_that_was_cropped_before_an_answer() -> None:
    course = Course(small("raas", top_k=48, update_interval=4), length=24)
    index = course.state.index
    assert isinstance(index, MilestoneIndex)
    for _ in range(10):
        course.step()
    course.read(20)
    course.crop(30)
    course.read(8)
    course.step()
    assert index._prompts == [[(0, 20), (26, 34)]]
    course.read(20)
    course.crop(35)
    course.step()
    assert index._prompts == [[(0, 20), (26, 31)]]  # nothing is left of the second prompt's end, nor of the third


def test_raas_forgets_a_prompt_that_was_cropped_and_read_anew() -> None:
    course = Course(small("raas", top_k=48, update_interval=4), length=24)
    for length in (30, 20):
        for _ in range(20):
            course.step()
        course.read(length)
        course.step()
    assert isinstance(course.state.index, MilestoneIndex)
    assert course.state.index._prompts == [[(0, 20), (40, 70), (91, 111)]]
    course.crop(60)
    course.read(5)
    course.step()
    assert course.state.index._prompts == [[(0, 20), (40, 56), (56, 61)]]


def test_what_was_dropped_does_not_return_when_the_query_asks_for_it() -> None:
    """A retrieval method would find the needle in the last step; these have dropped it."""
    for name in ("h2o", "raas"):
        state = layer(small(name, top_k=6))
        needle, other = 12 * torch.eye(64)[0], 12 * torch.eye(64)[1]
        keys = 0.01 * normal(1, 2, 80, 64)
        keys[:, :, 30:33], keys[:, :, 50:56] = needle, other
        queries = other.expand(1, 6, 80, 64)
        prefill_layer(state, queries, keys, normal(1, 2, 80, 64, seed=2), None, params())
        step = 0.01 * normal(1, 2, 1, 64, seed=3), normal(1, 2, 1, 64, seed=4), None, params()
        for _ in range(2):
            decode_step(state, other.expand(1, 6, 1, 64), *step)
        decode_step(state, needle.expand(1, 6, 1, 64), *step)
        assert not {26, 27, 28} & set(state.attended_ids(0).flatten().tolist()), name
        fresh = layer(small("quest", top_k=6))
        prefill_layer(fresh, queries, keys, normal(1, 2, 80, 64, seed=2), None, params())
        decode_step(fresh, needle.expand(1, 6, 1, 64), *step)
        assert {26, 27, 28} & set(fresh.attended_ids(0).flatten().tolist())


def test_pages_with_a_time_take_no_static_set() -> None:
    with pytest.raises(CompositionError, match="close up around static tokens"):
        methods.get("raas", static="observation-window")


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
            assert isinstance(index, IndexAround)
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

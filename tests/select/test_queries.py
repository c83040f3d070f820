"""The log of a sequence's last queries, against a naive list."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import kvrecall
from kvrecall.layer.pipeline import decode_step, prefill_layer
from kvrecall.layer.state import LayerState
from kvrecall.select.queries import QueryLog
from tests.one_layer import ZONES, layer, normal, params
from tests.strategies import examples

Naive = list[int]
"""Positions of the remembered queries; what a query is follows from its position."""
STEPS = st.lists(
    st.tuples(st.integers(0, 1), st.sampled_from(["add", "add", "shrink", "truncate"]), st.integers(0, 9)), max_size=25
)


def queries(sequence: int, start: int, count: int) -> Tensor:
    """`[2, count, 3]`, whole numbers that name sequence, head and position."""
    ids = torch.arange(start, start + count).view(1, -1, 1) + 1000 * torch.arange(2).view(2, 1, 1) + 10_000 * sequence
    return ids.expand(-1, -1, 3).float()


def lse(sequence: int, start: int, count: int) -> Tensor:
    return queries(sequence, start, count)[:, :, 0] + 0.5


def check(log: QueryLog, sequence: int, model: Naive, named: int | None = None) -> None:
    """The log knows exactly the queries of the model; `named` is what the sequence was called when they were added."""
    seen, named = log.seen(sequence), sequence if named is None else named
    if seen is None:
        assert not model
        return
    assert list(range(seen.start, seen.start + seen.queries.shape[1])) == model
    assert torch.equal(seen.queries, queries(named, seen.start, len(model)))
    assert torch.equal(seen.lse, lse(named, seen.start, len(model))) and seen.lse.dtype == torch.float32


@examples(150)
@given(window=st.integers(1, 6), steps=STEPS)
def test_any_course_equals_a_list(window: int, steps: list[tuple[int, str, int]]) -> None:
    log, model, ends = QueryLog(2, window), [list[int](), list[int]()], [0, 0]
    for b, what, count in steps:
        if what == "add" and count:
            log.add(b, queries(b, ends[b], count), lse(b, ends[b], count), ends[b])
            model[b] = (model[b] + list(range(ends[b], ends[b] + count)))[-window:]
            ends[b] += count
        elif what == "shrink":
            log.shrink(b, count)
            model[b] = model[b][-count:] if count else []
        elif what == "truncate":
            ends[b] = max(0, ends[b] - count)
            log.truncate(b, ends[b])
            model[b] = [p for p in model[b] if p < ends[b]]
        for i in range(2):
            check(log, i, model[i])


def test_nothing_is_known_before_anything_was_added() -> None:
    assert QueryLog(2, 4).seen(1) is None


def test_a_shrunk_log_grows_to_its_window_again() -> None:
    log = QueryLog(1, 5)
    log.add(0, queries(0, 0, 5), lse(0, 0, 5), 0)
    log.shrink(0, 2)
    check(log, 0, [3, 4])
    log.add(0, queries(0, 5, 2), lse(0, 5, 2), 5)
    check(log, 0, [3, 4, 5, 6])
    log.add(0, queries(0, 7, 2), lse(0, 7, 2), 7)
    check(log, 0, [4, 5, 6, 7, 8])


@pytest.mark.parametrize("count", [0, 1, 3, 4, 9])
def test_the_last_of_what_was_seen(count: int) -> None:
    log = QueryLog(1, 4)
    log.add(0, queries(0, 10, 4), lse(0, 10, 4), 10)
    seen = log.seen(0)
    assert seen is not None
    last = seen.last(count)
    kept = min(count, 4)
    assert last.start == 14 - kept and torch.equal(last.queries, queries(0, 14 - kept, kept))
    assert torch.equal(last.lse, lse(0, 14 - kept, kept))


@pytest.mark.parametrize("count", [2, 4, 7])
def test_what_is_kept_is_a_copy_in_the_queries_dtype(count: int) -> None:
    log, given_queries, given_lse = QueryLog(1, 4), queries(0, 0, count).bfloat16(), lse(0, 0, count)
    log.add(0, given_queries, given_lse, 0)
    expected = given_queries[:, -4:].clone()
    given_queries.zero_()
    given_lse.zero_()
    seen = log.seen(0)
    assert seen is not None and seen.queries.dtype == torch.bfloat16
    assert torch.equal(seen.queries, expected) and bool((seen.lse >= 0.5).all())
    assert seen.queries.untyped_storage().nbytes() <= 2 * 4 * 3 * 2  # no long chunk is held alive


def test_a_selection_goes_on_alone() -> None:
    log = QueryLog(2, 4)
    for b in range(2):
        log.add(b, queries(b, 0, 3), lse(b, 0, 3), 0)
    copy = log.select([1, 0, 1])
    log.add(1, queries(1, 3, 3), lse(1, 3, 3), 3)
    log.truncate(0, 1)
    copy.add(0, queries(1, 3, 1), lse(1, 3, 1), 3)
    copy.shrink(2, 1)
    check(copy, 0, [0, 1, 2, 3], named=1)
    check(copy, 1, [0, 1, 2], named=0)
    check(copy, 2, [2], named=1)
    check(log, 0, [0])
    check(log, 1, [2, 3, 4, 5])


@pytest.mark.parametrize("window", [2, 9])
def test_a_log_takes_over_what_another_knows_as_far_as_its_window_goes(window: int) -> None:
    log, other = QueryLog(2, 5), QueryLog(2, window)
    log.add(0, queries(0, 0, 5), lse(0, 0, 5), 0)
    other.add(1, queries(1, 0, 1), lse(1, 0, 1), 0)
    other.take_over(log)
    check(other, 0, [0, 1, 2, 3, 4][-window:])
    check(other, 1, [])
    other.add(0, queries(0, 5, 1), lse(0, 5, 1), 5)
    check(other, 0, [0, 1, 2, 3, 4, 5][-window:])
    check(log, 0, [0, 1, 2, 3, 4])


def test_added_under_inference_mode_and_again_outside() -> None:
    log = QueryLog(1, 6)
    with torch.inference_mode():
        log.add(0, queries(0, 0, 3), lse(0, 0, 3), 0)
    log.add(0, queries(0, 3, 2), lse(0, 3, 2), 3)
    check(log, 0, [0, 1, 2, 3, 4])
    seen = log.seen(0)
    assert seen is not None and not seen.queries.is_inference() and not seen.lse.is_inference()


@pytest.mark.parametrize("name", ["full", "prkv", "ctkvr"])
def test_a_layer_remembers_consecutive_queries_when_a_prompt_goes_on_after_decoding(name: str) -> None:
    method = kvrecall.methods.get(name, **({} if name == "full" else {"top_k": 32}), **ZONES)
    state = LayerState(0, layer(method).shape, method, observe_queries=8)
    prompt = normal(1, 6, 30, 64)
    prefill_layer(state, prompt, normal(1, 2, 30, 64, seed=1), normal(1, 2, 30, 64, seed=2), None, params())
    asked = [prompt[0]]
    for step in range(3):
        q, k, v = (normal(1, h, 1, 64, seed=9 + 3 * step + i) for i, h in enumerate((6, 2, 2)))
        decode_step(state, q, k, v, None, params())
        asked.append(q[0])
    more = normal(1, 6, 4, 64, seed=99)
    prefill_layer(state, more, normal(1, 2, 4, 64, seed=3), normal(1, 2, 4, 64, seed=4), None, params())
    every = torch.cat([*asked, more[0]], 1)
    assert state.log is not None
    seen = state.log.seen(0)
    assert seen is not None
    assert torch.equal(seen.queries, every[:, seen.start : seen.start + seen.queries.shape[1]])

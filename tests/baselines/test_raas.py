"""RaaS against times of pages written as loops; dropped rows stay on the host, and nothing looks at them."""

from __future__ import annotations

import pytest
import torch

from kvrecall import methods
from kvrecall.baselines.raas import MilestoneIndex
from kvrecall.core.errors import CompositionError
from tests.baselines.course import Course
from tests.baselines.small import small


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


def test_pages_with_a_time_take_no_static_set() -> None:
    with pytest.raises(CompositionError, match="close up around static tokens"):
        methods.get("raas", static="observation-window")

"""The borders of segments in the window, against a naive model that keeps every border it ever saw."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrecall.trigger.segments import SegmentLog
from tests.strategies import examples

STEPS = st.lists(
    st.tuples(st.sampled_from(["token", "turn", "evict", "prompt", "crop"]), st.integers(0, 30)), min_size=1, max_size=60
)


class Naive:
    """One sequence: its window start .. end - 1, and all borders."""

    def __init__(self, usual: int, longest: int) -> None:
        self.usual, self.longest = usual, longest
        self.start, self.end, self.borders = 0, 0, set[int]()

    def oldest(self) -> int:
        length = 0
        while self.start + length < self.end:
            length += 1
            if length == self.longest or self.start + length in self.borders:
                break
        return length

    def cut(self) -> None:
        last = max(self.borders, default=-1)
        self.borders |= {p for p in range(self.start, self.end, self.usual) if p > last} | {self.end}


def lengths(log: SegmentLog, start: int, end: int, sequence: int = 0) -> list[int]:
    """Lengths of all the segments into which the window falls."""
    found = []
    while start < end:
        found.append(log.oldest(sequence, start, end))
        start += found[-1]
    return found


@pytest.mark.parametrize("marked", [False, True])
@examples(150)
@given(usual=st.integers(1, 5), more=st.integers(0, 7), steps=STEPS)
def test_any_course_equals_a_naive_model(marked: bool, usual: int, more: int, steps: list[tuple[str, int]]) -> None:
    log = SegmentLog(1, usual, usual + more, marked=marked)
    model = Naive(usual, usual + more if marked else usual)
    for what, count in steps:
        if what == "turn":
            log.mark(0, model.end)
            model.borders.add(model.end)
        elif what == "evict":
            model.start += model.oldest()
        elif what == "prompt":
            model.end += count
            model.start = max(model.start, model.end - 10)
            log.cut(0, model.start, model.end)
            model.cut()
        elif what == "crop":
            model.end = max(model.start, model.end - count)
            log.truncate(0, model.end)
            model.borders = {p for p in model.borders if p < model.end}
        if what in ("token", "turn"):
            model.end += 1
        found = log.oldest(0, model.start, model.end)
        assert found == model.oldest() == log.oldest(0, model.start, model.end)
        assert min(1, model.end - model.start) <= found <= min(model.longest, model.end - model.start)


def test_a_segment_ends_where_the_next_begins() -> None:
    log = SegmentLog(1, 4, 100, marked=True)
    for position in (0, 3, 4, 40):
        log.mark(0, position)
    assert lengths(log, 0, 50) == [3, 1, 36, 10]


def test_a_segment_without_an_end_is_cut_at_the_longest() -> None:
    log = SegmentLog(1, 4, 10, marked=True)
    log.mark(0, 25)
    assert lengths(log, 0, 50) == [10, 10, 5, 10, 10, 5]


def test_without_a_trigger_that_marks_all_segments_are_usual() -> None:
    assert lengths(SegmentLog(1, 4, 10, marked=False), 7, 20) == [4, 4, 4, 1]


def test_the_tail_of_a_prompt_falls_into_usual_segments_and_decoding_begins_another() -> None:
    log = SegmentLog(1, 4, 10, marked=True)
    log.cut(0, 90, 100)
    assert lengths(log, 90, 106) == [4, 4, 2, 6]


def test_a_prompt_that_goes_on_keeps_the_borders_of_what_was_generated() -> None:
    log = SegmentLog(1, 4, 10, marked=True)
    log.cut(0, 0, 6)
    log.mark(0, 9)
    log.cut(0, 3, 20)  # tokens 6 .. 10 were generated, 11 .. 19 are prompt again
    assert lengths(log, 3, 25) == [1, 2, 3, 2, 4, 4, 1, 5]


def test_marking_twice_is_marking_once() -> None:
    log = SegmentLog(1, 4, 10, marked=True)
    log.mark(0, 5)
    log.mark(0, 5)
    log.cut(0, 5, 5)
    assert lengths(log, 2, 9) == [3, 4]


def test_the_window_starts_in_the_middle_of_a_segment() -> None:
    log = SegmentLog(1, 4, 10, marked=True)
    for position in (0, 20, 30):
        log.mark(0, position)
    assert log.oldest(0, 17, 40) == 3


def test_an_empty_window_has_no_segment() -> None:
    log = SegmentLog(1, 4, 10, marked=True)
    log.mark(0, 5)
    assert log.oldest(0, 5, 5) == 0


def test_truncate_forgets_borders_behind_the_cut_only() -> None:
    log = SegmentLog(2, 4, 10, marked=True)
    for b in range(2):
        for position in (2, 5, 8):
            log.mark(b, position)
    log.truncate(0, 5)
    assert lengths(log, 0, 10) == [2, 8] and log.oldest(1, 5, 10) == 3
    log.truncate(1, 100)
    log.mark(0, 12)
    assert log.oldest(0, 5, 20) == 7 and log.oldest(1, 7, 20) == 1


def test_sequences_have_borders_of_their_own_and_a_selection_copies_them() -> None:
    log = SegmentLog(2, 4, 100, marked=True)
    log.mark(0, 3)
    log.mark(1, 5)
    copy = log.select([1, 1, 0])
    copy.mark(0, 7)
    log.mark(1, 6)
    log.truncate(0, 0)
    assert copy.oldest(2, 0, 20) == 3
    assert [copy.oldest(b, 5, 20) for b in range(3)] == [2, 15, 15]
    assert log.oldest(1, 5, 20) == 1 and log.oldest(0, 0, 20) == 20

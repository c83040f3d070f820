"""A thread takes memory ahead of need."""

from __future__ import annotations

import threading

from kvrecall.step.ahead import Ahead


def test_memory_is_taken_piece_by_piece_up_to_what_is_wanted() -> None:
    taken, asked, done = [0], list[float](), threading.Event()

    def take(wanted: int) -> float | None:
        if taken[-1] >= wanted:
            done.set()
            return None
        if len(asked) % 2:  # not a good moment
            asked.append(0.001)
            return 0.001
        asked.append(0.0)
        taken.append(taken[-1] + 3)
        return 0.0

    ahead = Ahead(take)
    for wanted, last in ((7, 9), (10, 12)):
        ahead.want(wanted)
        assert done.wait(10) and taken[-1] == last
        done.clear()
        ahead.want(wanted - 2)  # there is more already
    ahead.close()
    ahead.want(100)
    assert taken == [0, 3, 6, 9, 12], "it has ended"


def test_a_refusal_ends_nothing() -> None:
    calls, seen = [], threading.Event()

    def take(wanted: int) -> float | None:
        calls.append(wanted)
        seen.set()
        return None

    ahead = Ahead(take)
    for wanted in (4, 8):
        seen.clear()
        ahead.want(wanted)
        assert seen.wait(10), "what is wanted later is tried again"
    ahead.close()
    assert calls == [4, 8]

"""What `benchmarks.row_cache` says is kept: what the kernel keeps."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("triton", reason="Triton is only there on Linux")
from benchmarks.row_cache import WAYS, Lru, RowCache, share_kept


def test_rows_that_were_used_last_are_kept() -> None:
    kept = Lru(3)
    assert [kept.step(rows) for rows in ([1, 2, 3], [2, 3], [4, 5], [1], [5, 4])] == [0, 2, 0, 0, 2]


def test_a_set_keeps_one_new_row_per_step_in_the_place_of_its_oldest() -> None:
    """With one set, rows of a step that are missing want the same place."""
    kept = RowCache(WAYS)
    assert kept.step([0, 1]) == 0 and kept.step([0, 1]) == 1
    assert kept.step([0, 1]) == 2
    for row in range(2, WAYS + 1):
        assert kept.step([row]) == 0
    assert kept.step([0]) == 0 and kept.step([2]) == 1, "the oldest one has left"


def test_the_second_half_of_the_steps_is_counted() -> None:
    assert share_kept([[1, 2], [3, 4], [3, 1], [3, 9]], Lru(2)) == 0.5


def test_few_rows_for_a_set_are_kept_as_by_the_least_recently_used() -> None:
    draw = random.Random(4)
    steps = [draw.sample(range(64), 20) for _ in range(40)]
    assert share_kept(steps, RowCache(64 * WAYS)) > 0.99 * share_kept(steps, Lru(64))

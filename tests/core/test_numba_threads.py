"""Short loops use few threads, and leave the number of threads as it was."""

from __future__ import annotations

import subprocess
import sys

import numba
import pytest

from kvrecall.core.numba import MOST, numba_threads


@numba_threads()
def threads_inside(fails: bool = False) -> int:
    if fails:
        raise ValueError
    return numba.get_num_threads()


def test_no_more_threads_than_before() -> None:
    before = numba.get_num_threads()
    assert threads_inside() == min(before, MOST)
    with pytest.raises(ValueError):
        threads_inside(fails=True)
    assert numba.get_num_threads() == before


def test_at_most_so_many_threads() -> None:
    """In a process of its own: numba starts as many threads as this says, whatever the number of cores."""
    code = "from tests.core.test_numba_threads import *; print(threads_inside(), numba.get_num_threads())"
    env = {"NUMBA_NUM_THREADS": "20", "OMP_NUM_THREADS": "1", "PATH": ""}
    told = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert told.stdout.split() == [str(MOST), "20"]

"""A limit on numba's threads for loops of a millisecond, where waking a thread takes longer than its share of the work.

Only modules with numba code may import it, because it imports numba.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from numba import get_num_threads, set_num_threads

from kvrecall.core.numeric import loops_turn

MOST = 16
"""Threads of a short loop. A step of CTkvr at 64K on 32 cores takes 1.7 ms with 16 threads, 2.2 with 8 and 4.0 with 32."""


@contextmanager
def few_threads() -> Iterator[None]:
    """Within the context, or a function with this decorator, the calling thread's numba loops use at most `MOST` threads, and
    run in `loops_turn`."""
    with loops_turn():
        before = get_num_threads()
        if before <= MOST:
            yield
            return
        set_num_threads(MOST)
        try:
            yield
        finally:
            set_num_threads(before)

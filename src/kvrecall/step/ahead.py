"""Takes host memory ahead of need, in a thread: no pass waits until memory is page-locked."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from time import perf_counter, sleep


class Ahead:
    """A thread that takes memory piece by piece while there is less than wanted. It rests as long as each piece took, because
    page-locking holds up launches of kernels."""

    def __init__(self, take: Callable[[int], bool]) -> None:
        """take: takes one piece if fewer blocks than the given number have memory, and returns whether it did."""
        self._take, self._wanted, self._ended = take, 0, False
        self._more = threading.Event()
        atexit.register(self.close)
        self._thread = threading.Thread(target=self._run, name="kvrecall-memory", daemon=True)
        self._thread.start()

    def want(self, blocks: int) -> None:
        """The first `blocks` blocks are to have memory; returns at once."""
        if blocks > self._wanted:
            self._wanted = blocks
            self._more.set()

    def close(self) -> None:
        """Ends the thread, behind the piece that it is taking."""
        self._ended = True
        self._more.set()
        self._thread.join(5)

    def _run(self) -> None:
        while not self._ended:
            self._more.wait()
            self._more.clear()
            begun = perf_counter()
            while not self._ended and self._take(self._wanted):
                sleep(perf_counter() - begun)
                begun = perf_counter()

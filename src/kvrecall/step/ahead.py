"""Takes host memory ahead of need, in a thread: no pass waits until memory is page-locked."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from time import sleep


class Ahead:
    """A thread that takes memory piece by piece while there is less than wanted."""

    def __init__(self, take: Callable[[int], float | None]) -> None:
        """take: takes one piece if fewer blocks than the given number have memory and it is a good moment. Returns after how
        many seconds to call it again, None if there is enough."""
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
            while not self._ended and (rest := self._take(self._wanted)) is not None:
                sleep(rest)

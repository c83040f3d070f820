"""Host memory of all layers of an engine: it grows with the blocks that are handed out, and ahead of them in a thread.

Memory that a GPU can read is touched, so that the system gives its pages, then page-locked. Touching takes longer, and no pass
waits for it. Page-locking holds up launches, by some 25 ms per GiB.
"""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Callable
from time import perf_counter

from kvrecall.core.errors import KVRecallError
from kvrecall.core.launch import cdiv
from kvrecall.step.memory import HostPlan
from kvrecall.step.stream import RowBlocks

_log = logging.getLogger("vllm.kvrecall")

_BURST = 1 << 16
"""Tokens that may come at once without waiting for host memory."""
_IDLE_S = 0.5
"""An engine is idle so many seconds behind the beginning of its last pass."""


class Growth:
    """Memory for the first blocks of all layers.

    The thread keeps what a burst needs beyond the blocks that were handed out, or everything. It locks while the engine is
    idle, and beside passes when half of a burst's memory is used up.
    """

    def __init__(
        self, plan: HostPlan, blocks: int, everything: bool, on_change: Callable[[int], None], on_device: int = 0
    ) -> None:  # fmt: skip
        """blocks: that there are. everything: whether all are to have memory as soon as possible. on_change: is called with the
        bytes that are taken, whenever they change. on_device: blocks with rows in device memory, which are not in that."""
        self.given = max(1, on_device)
        """Blocks with memory."""
        self.hosts: list[RowBlocks] = []
        """Rows of all layers."""
        self.burst = cdiv(_BURST, plan.block_size)
        """Blocks that the thread keeps ahead."""
        self._plan, self._blocks, self._everything, self._on_change = plan, blocks, everything, on_change
        self._on_device, self._used, self._touched, self._passed = on_device, 1, self.given, perf_counter()
        self._growing, self._more = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None
        self._locks, self._ended = False, False

    def commit(self, blocks: int) -> None:
        """Returns when the first `blocks` blocks have memory. Raises HostMemoryError if the machine has too little, and
        ParameterError if the system refuses to lock it; `given` blocks have it then."""
        while self.given < min(blocks, self._blocks):
            with self._growing:
                if self.given < blocks:
                    self._take(min((self.given // self._plan.slab + 1) * self._plan.slab, self._blocks))

    def hand_out(self, blocks: int) -> None:
        """As `commit`, for a pass that uses these blocks; the thread keeps more ahead of them."""
        self._used = max(self._used, blocks)
        self._more.set()
        self.commit(blocks)

    def begin_pass(self) -> None:
        """The engine is at work from now on."""
        self._passed = perf_counter()

    def touch_ahead(self, blocks: int) -> None:
        """Starts the thread, which only touches memory until `lock_ahead` is called: of these blocks, if they hold a burst."""
        self._used = max(self._used, blocks - self.burst)
        atexit.register(self.close)
        self._thread = threading.Thread(target=self._run, name="kvrecall-memory", daemon=True)
        self._thread.start()

    def lock_ahead(self) -> None:
        """The thread may page-lock memory from now on: nothing is recorded any more, which it would disturb."""
        self._locks = True
        self._more.set()

    def close(self) -> None:
        """Ends the thread, behind the piece that it is taking, and gives back what it has prepared."""
        self._ended = True
        self._more.set()
        if self._thread is None:
            return
        atexit.unregister(self.close)
        self._thread.join(5)
        if not self._thread.is_alive():
            for host in self.hosts:
                host.give_back()
            self._touched = self.given
            self._tell()

    def _run(self) -> None:
        while not self._ended:
            self._more.clear()
            try:
                rest = self._next()
            except RuntimeError as error:  # no thread can be started: there are too many, or the process ends
                if threading.main_thread().is_alive() and not self._ended:
                    _log.warning("kvrecall: host memory is not prepared ahead for now: %s", error)
                rest = None
            self._more.wait(rest)

    def _next(self) -> float | None:
        """Takes a piece, if there is one to take. Returns after how many seconds to ask again, None: when more is used."""
        with self._growing:
            wanted = self._blocks if self._everything else min(self._used + self.burst, self._blocks)
            urgent = self.given < min(self._used + self.burst // 2, self._blocks)
            try:
                if self._locks and self.given < wanted and (urgent or perf_counter() - self._passed > _IDLE_S):
                    self._touch(min(self.given + self._plan.slab, wanted), ahead=True)
                    begun = perf_counter()
                    self._take(min(self.given + self._plan.slab, wanted))
                    return perf_counter() - begun
                if self._touched < wanted:
                    self._touch(min(self._touched + self._plan.slab, wanted), ahead=True)
                    return 0.0
            except KVRecallError:  # a pass that needs the memory will say so
                return None
            return _IDLE_S if self.given < wanted else None

    def _touch(self, blocks: int, ahead: bool = False) -> None:
        if blocks > self._touched:
            self._plan.check(blocks - self._touched, ahead)
            RowBlocks.touch(self.hosts, blocks)
            self._touched = blocks
            self._tell()

    def _tell(self) -> None:
        self._on_change((self._touched - self._on_device) * self._plan.block_bytes)

    def _take(self, blocks: int) -> None:
        self._touch(blocks)
        for host in self.hosts:
            host.commit(blocks)
        self.given = blocks

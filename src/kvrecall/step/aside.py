"""Streams beside a pass's own, for work of its layers that no later layer needs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

BEHIND = 4
"""Launches that hold memory of the pass at a time."""
_STREAMS = 8
"""For work at the end of a pass: small kernels that wait for memory most of the time."""


class Aside:
    """Nothing is beside a pass on a CPU. Recorded passes have the work as branches.

    Work must read and write lasting memory only, apart from what it says: what belongs to the pass is given away meanwhile.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: list[torch.cuda.Stream] = []
        self._used = False
        self._ended: deque[tuple[torch.cuda.Event, tuple[torch.Tensor, ...]]] = deque()
        self._later: list[Callable[[], None]] = []

    @contextmanager
    def launched(self, *held: torch.Tensor) -> Iterator[None]:
        """What is launched here runs beside what the current stream is given later. held: memory of torch's allocator that it
        reads, kept until the current stream waits for it: before the work `BEHIND` launches later, or at the end."""
        if self._device.type != "cuda":
            yield
            return
        stream, here = self._stream(0), torch.cuda.current_stream(self._device)
        if len(self._ended) >= BEHIND:
            here.wait_event(self._ended.popleft()[0])  # what was held then is free for the work behind this
        stream.wait_stream(here)
        with torch.cuda.stream(stream):
            yield
        ended = torch.cuda.Event()
        ended.record(stream)
        self._ended.append((ended, held))
        self._used = True

    def later(self, work: Callable[[], None]) -> None:
        """Launches work at the end of the pass, beside other such work: a kernel that runs beside a layer takes the registers
        that the layer's own kernels need."""
        self._later.append(work)

    def join(self) -> None:
        """Called at the end of each pass: does what was put off, and lets the pass's stream wait for all work."""
        todo, self._later = self._later, []
        if self._device.type != "cuda":
            for work in todo:
                work()
            return
        here = torch.cuda.current_stream(self._device)
        used = [self._stream(i) for i in range(max(self._used, min(len(todo), _STREAMS)))]
        for i, work in enumerate(todo):
            if i < _STREAMS:
                used[i].wait_stream(here)
            with torch.cuda.stream(used[i % _STREAMS]):
                work()
        for stream in used:
            here.wait_stream(stream)
        self._used = False
        self._ended.clear()

    def _stream(self, number: int) -> torch.cuda.Stream:
        while len(self._streams) <= number:
            self._streams.append(torch.cuda.Stream(self._device))
        return self._streams[number]

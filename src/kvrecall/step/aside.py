"""A stream beside a pass's own, for work of its layers that no later layer needs."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch

BEHIND = 4
"""Launches that hold memory of the pass at a time."""


class Aside:
    """Nothing is beside a pass on a CPU. Recorded passes have the work as a branch."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._used = False
        self._ended: deque[torch.cuda.Event] = deque()

    @contextmanager
    def launched(self, *held: torch.Tensor) -> Iterator[None]:
        """What is launched here runs beside what the current stream is given later. held: memory of torch's allocator that it
        reads; all else that it reads and writes must last, since the memory of a pass is given away meanwhile. It begins when
        what was launched `BEHIND` times before has ended, so that little is held."""
        if self._device.type != "cuda":
            yield
            return
        self._stream, here = self._stream or torch.cuda.Stream(self._device), torch.cuda.current_stream(self._device)
        if held and len(self._ended) >= BEHIND:
            here.wait_event(self._ended.popleft())
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            yield
        for tensor in held:
            tensor.record_stream(self._stream)
        if held:
            self._ended.append(torch.cuda.Event())
            self._ended[-1].record(self._stream)
        self._used = True

    def join(self) -> None:
        """Called at the end of each pass: its stream waits for the work."""
        if self._used and self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        self._used = False
        self._ended.clear()

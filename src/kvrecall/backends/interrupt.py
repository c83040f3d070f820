"""Signals wait until a layer has finished storing, so that none can leave half a token behind.

A handler set in Python may raise: Ctrl-C, a time-out by SIGALRM, SIGTERM made SystemExit. Python runs handlers between any two
instructions of the main thread, so all of them are deferred, whichever signal they are for. Blocking signals in the kernel
would not do: another thread would take the signal, and the main thread would run the handler all the same.
"""

from __future__ import annotations

import _signal  # pyright: ignore[reportMissingImports] - `signal` makes enums, which takes a microsecond for each number
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_Handler = Callable[[int, FrameType | None], Any]

_FAULTS = {getattr(signal, name) for name in ("SIGSEGV", "SIGFPE", "SIGBUS", "SIGILL") if hasattr(signal, name)}
_NUMBERS = sorted(int(number) for number in signal.valid_signals() - _FAULTS)


class _Relay:
    """Stands for a handler: remembers signals while it is closed, and hands them on at any other time. One that could not be
    taken away again therefore does no harm."""

    def __init__(self, number: int, handler: _Handler) -> None:
        self.number, self.handler, self.closed = number, handler, True
        self.waiting: list[tuple[int, FrameType | None]] = []

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.closed:
            self.waiting.append((number, frame))
        else:
            self.handler(number, frame)


@contextmanager
def deferred_interrupt() -> Iterator[None]:
    """Delays every signal with a handler in Python to the end of the block, and the first exception of a handler with it.

    In other threads there is nothing to delay: Python runs handlers in the main thread only. Takes about as long as reading
    the handlers of all signals, a few microseconds.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    relays: list[_Relay] = []
    try:
        for number, handler in zip(_NUMBERS, map(_signal.getsignal, _NUMBERS), strict=True):
            if not callable(handler):  # the system's own, which no Python runs for
                continue
            if isinstance(handler, _Relay):
                if handler.closed:  # a block around this one waits already
                    continue
                handler = handler.handler
            relays.append(_Relay(number, handler))
            _signal.signal(number, relays[-1])
        yield
    finally:
        _open(relays)


def _open(relays: list[_Relay]) -> None:
    """Puts the handlers back and has them handle what came. All of that is done before the first of their exceptions rises."""
    error: BaseException | None = None
    for relay in relays:
        relay.closed = False
    for relay in relays:
        try:
            if _signal.getsignal(relay.number) is relay:
                _signal.signal(relay.number, relay.handler)
        except BaseException as raised:  # by a handler that is back, of a signal that came this moment
            error = error or raised
    for relay in relays:
        for number, frame in relay.waiting:
            try:
                relay.handler(number, frame)
            except BaseException as raised:
                error = error or raised
    if error is not None:
        raise error

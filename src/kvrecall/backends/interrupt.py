"""Signals wait until a layer has finished storing, so that none can interrupt half-way.

A Python signal handler may raise: Ctrl-C, a time-out by SIGALRM, SIGTERM turned into SystemExit. Python runs handlers between
any two instructions of the main thread, so all handlers are deferred. Blocking signals in the kernel would not help: another
thread would receive the signal, and the main thread would still run the handler.
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
    """Replaces a handler. While closed it remembers signals; otherwise it passes them on, so a relay that could not be removed
    does no harm."""

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
    """Delays all Python signal handlers to the end of the block, which then raises the first of their exceptions.

    Does nothing in other threads, because Python runs handlers in the main thread only. Takes a few microseconds.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    relays: list[_Relay] = []
    try:
        for number, handler in zip(_NUMBERS, map(_signal.getsignal, _NUMBERS), strict=True):
            if not callable(handler):  # handled by the system, not by Python
                continue
            if isinstance(handler, _Relay):
                if handler.closed:  # an outer block defers already
                    continue
                handler = handler.handler
            relays.append(_Relay(number, handler))
            _signal.signal(number, relays[-1])
        yield
    finally:
        _open(relays)


def _open(relays: list[_Relay]) -> None:
    """Restores the handlers and runs them for the remembered signals; then raises the first of their exceptions."""
    error: BaseException | None = None
    for relay in relays:
        relay.closed = False
    for relay in relays:
        try:
            if _signal.getsignal(relay.number) is relay:
                _signal.signal(relay.number, relay.handler)
        except BaseException as raised:  # from a restored handler, for a signal that came just now
            error = error or raised
    for relay in relays:
        for number, frame in relay.waiting:
            try:
                relay.handler(number, frame)
            except BaseException as raised:
                error = error or raised
    if error is not None:
        raise error

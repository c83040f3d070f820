"""A forked child of a test: it can be killed, lose its rights, or run out of disk, and the test goes on."""

from __future__ import annotations

import os
import resource
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tqdm import tqdm

NOBODY = 65534


@dataclass
class Child:
    """pid: of the process. pipe: where what it returned arrives."""

    pid: int
    pipe: int

    def kill(self) -> None:
        """Ends it at once, without a chance to clean up."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self.pipe)

    def result(self) -> str:
        """What it returned as text, for an exception `ClassName: message`."""
        with os.fdopen(self.pipe, "rb") as pipe:
            told = pipe.read().decode()
        _, status = os.waitpid(self.pid, 0)
        assert os.WIFEXITED(status), f"died of signal {os.WTERMSIG(status)}"
        return told


def _bars(bars: type[tqdm]) -> Iterator[type[tqdm]]:
    """A class of progress bars and those derived from it; the first that is used may have made a lock of its own."""
    yield bars
    for derived in bars.__subclasses__():
        yield from _bars(derived)


def start(run: Callable[[], object], *, without_rights: bool = False, file_bytes: int | None = None) -> Child:
    """Runs in a forked process. without_rights: as nobody where the test runs as root; file_bytes: no file may get larger."""
    reading, writing = os.pipe()
    if pid := os.fork():
        os.close(writing)
        return Child(pid, reading)
    try:
        os.close(reading)
        # The parent's locks are shared by both: killed with one, the child would leave it locked.
        for bars in _bars(tqdm):
            bars.set_lock(threading.RLock())
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        if without_rights and os.getuid() == 0:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
        if file_bytes is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
        try:
            told = str(run())
        except BaseException as error:
            told = f"{type(error).__name__}: {error}"
        os.write(writing, told.encode())
    finally:
        # No clean-up of the parent's: its fixtures are not this process's to end.
        os._exit(0)

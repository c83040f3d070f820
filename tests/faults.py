"""Faults that a system may show: a full disk, seen as a limit on the size of a file; command lines that are killed."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

COMMANDS: ForkServerContext = multiprocessing.get_context("forkserver")
COMMANDS.set_forkserver_preload(["kvrecall.cli.app", "kvrecall.evaluate.suite", "kvrecall.models.load", "kvrecall.engine",
                                 "transformers.models.llama.modeling_llama"])  # fmt: skip
"""Processes of the command line that need not import everything again, which takes seconds: each is a fork of one that has."""


class Command:
    """A call of `kvrecall` in a process of its own. errors: the file for its standard error."""

    def __init__(self, errors: Path, *args: object) -> None:
        self._errors = errors
        self._process: Any = COMMANDS.Process(target=_run, args=(str(errors), [str(a) for a in args]))
        self._process.start()

    @property
    def ended(self) -> bool:
        return not self._process.is_alive()

    def send_signal(self, number: signal.Signals) -> None:
        if not self.ended:
            os.kill(self._process.pid, number)

    def wait(self, timeout: float = 300) -> tuple[bytes, int]:
        """(what it said to standard error, its exit code, or minus the signal that ended it). It is killed if it goes on."""
        self._process.join(timeout)
        if not self.ended:
            self._process.kill()
            self._process.join()
            raise TimeoutError(f"it went on for more than {timeout} s")
        return self._errors.read_bytes(), self._process.exitcode


def _run(errors: str, args: list[str]) -> None:
    with open(errors, "wb") as said, open(os.devnull, "wb") as nothing:
        os.dup2(said.fileno(), 2)
        os.dup2(nothing.fileno(), 1)
    from kvrecall.cli import main

    sys.argv = ["kvrecall", *args]
    main()


@contextmanager
def limited_files(size: int) -> Iterator[None]:
    """Inside, no file of this process grows beyond so many bytes."""
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)

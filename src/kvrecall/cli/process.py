"""This process as others see it: exit codes, standard streams, and how the threads of torch and numba wait for work.

Both use OpenMP. By default its threads wait in a loop that keeps a core busy for milliseconds. If other programs use the cores
too, this loop takes the core from the thread that has the work, at each of the hundreds of small parallel pieces of a decode
step. Threads that sleep while they wait do not (numbers in docs/guide/threads.md).
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress

EXIT_ERROR = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141
"""A shell's exit code for a program ended by SIGPIPE."""
POLICY = "OMP_WAIT_POLICY"
_OTHER_VARIABLES = ("GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""Variables by which a user sets this for an OpenMP library."""
_set_here = False


def wait_passively() -> None:
    """Lets threads of this process sleep while they wait, unless the environment sets it. Must run before torch is imported."""
    global _set_here
    if "torch" in sys.modules or any(name in os.environ for name in (POLICY, *_OTHER_VARIABLES)):
        return
    os.environ[POLICY] = "PASSIVE"
    _set_here = True


def leave_environment() -> None:
    """Restores the user's environment, for a program that replaces this process."""
    if _set_here:
        os.environ.pop(POLICY, None)


def waiting() -> str:
    """Text: how threads wait, and what decided it."""
    if _set_here:
        return "asleep (kvrecall's choice)"
    variables = [f"{name}={os.environ[name]}" for name in (POLICY, *_OTHER_VARIABLES) if name in os.environ]
    return f"as {', '.join(variables)} says" if variables else "busy, OpenMP's default"


def open_streams() -> None:
    """Opens missing standard output or error (`>&-`), because the next opened file would get their number."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_WRONLY)
            if descriptor != number:
                os.dup2(descriptor, number)
                os.close(descriptor)
            setattr(sys, name, open(number, "w", encoding="utf-8", closefd=False))  # noqa: SIM115


def discard_stdout() -> None:
    """Drops unwritten output, because Python would write it at exit and print a traceback."""
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        return
    with suppress(OSError, ValueError):  # a stream without a file, as in tests
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)

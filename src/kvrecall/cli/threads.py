"""How the threads of torch and numba wait for their next piece of work.

Both use OpenMP. By default its threads wait in a loop that keeps a core busy for milliseconds. If other programs use the cores
too, this loop takes the core from the thread that has the work, at each of the hundreds of small parallel pieces of a decode
step. Threads that sleep while they wait do not (numbers in docs/guide/threads.md).
"""

from __future__ import annotations

import os
import sys

POLICY = "OMP_WAIT_POLICY"
_OWN = ("GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""Variables by which a user sets this for an OpenMP library."""
_chosen_here = False


def wait_passively() -> None:
    """Lets threads of this process sleep while they wait, unless the environment sets it. Must run before torch is imported."""
    global _chosen_here
    if "torch" in sys.modules or any(name in os.environ for name in (POLICY, *_OWN)):
        return
    os.environ[POLICY] = "PASSIVE"
    _chosen_here = True


def leave_environment() -> None:
    """Restores the user's environment, for a program that replaces this process."""
    if _chosen_here:
        os.environ.pop(POLICY, None)


def waiting() -> str:
    """Text: how threads wait, and what decided it."""
    if _chosen_here:
        return "asleep (kvrecall's choice)"
    given = [f"{name}={os.environ[name]}" for name in (POLICY, *_OWN) if name in os.environ]
    return f"as {', '.join(given)} says" if given else "busy, OpenMP's default"

"""How the threads of torch and numba wait for their next piece of work.

Both bring OpenMP, whose threads by default wait in a loop that keeps a core busy for milliseconds, in case more work follows.
Where other programs want the cores as well, that loop takes the core from the very thread that has the work, at every one of a
decode step's hundreds of small parallel pieces. Threads that sleep while they wait do not (docs/guide/threads.md has numbers).
"""

from __future__ import annotations

import os
import sys

POLICY = "OMP_WAIT_POLICY"
_OWN = ("GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""Variables by which a user decides the same thing for one of the OpenMP libraries."""
_chosen_here = False


def wait_passively() -> None:
    """Threads of this process sleep while they wait, unless the environment says otherwise. Works before torch is imported."""
    global _chosen_here
    if "torch" in sys.modules or any(name in os.environ for name in (POLICY, *_OWN)):
        return
    os.environ[POLICY] = "PASSIVE"
    _chosen_here = True


def leave_environment() -> None:
    """Another program that takes this process's place finds the environment as the user left it."""
    if _chosen_here:
        os.environ.pop(POLICY, None)


def waiting() -> str:
    """How threads wait, and who decided it, for people."""
    if _chosen_here:
        return "asleep (kvrecall's choice)"
    given = [f"{name}={os.environ[name]}" for name in (POLICY, *_OWN) if name in os.environ]
    return f"as {', '.join(given)} says" if given else "busy, OpenMP's default"

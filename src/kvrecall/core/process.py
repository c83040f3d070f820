"""Whether this process may compute: not one that was forked after kvrecall had computed.

OpenMP's threads do not exist in such a process: its loops hang, or end the process.
"""

from __future__ import annotations

import os

from kvrecall.core.errors import ForkedProcessError

_computed = False
_forked = False


def check_process(computes: bool = False) -> None:
    """Raises ForkedProcessError in a process that was forked after its parent had computed. computes: this process is about to
    compute. Takes no lock, because another thread may have held it during the fork."""
    global _computed
    if _forked:
        raise ForkedProcessError
    _computed = _computed or computes


def _after_fork() -> None:
    global _forked
    _forked = _computed


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)

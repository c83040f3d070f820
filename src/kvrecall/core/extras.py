"""What must hold before work begins: optional packages are installed, and the process may compute."""

from __future__ import annotations

import os
import re
from importlib import metadata
from importlib.util import find_spec

from kvrecall.core.errors import ForkedProcessError, MissingPackageError

TRANSFORMERS = ((5, 16, 1), (5, 25))
"""The oldest supported release of transformers, and the first untested one; as in pyproject.toml."""

SERVER = ("fastapi", "uvicorn")
"""Packages that the server on transformers needs; installed by the extra `serve`."""


def require_transformers() -> None:
    """Raises MissingPackageError if transformers is missing or of a release that the extra `transformers` does not allow."""
    if find_spec("transformers") is None:
        raise MissingPackageError("transformers", "transformers")
    oldest, end = TRANSFORMERS
    version = metadata.version("transformers")
    if not oldest <= tuple(map(int, re.findall(r"\d+", version)[:3])) < end:
        expected = f"{'.'.join(map(str, oldest))} or newer, but before {'.'.join(map(str, end))}"
        raise MissingPackageError("transformers", "transformers", expected=expected, got=version)


def require_server() -> None:
    """Raises MissingPackageError if transformers, or a package that the server needs, is missing."""
    require_transformers()
    for name in SERVER:
        if find_spec(name) is None:
            raise MissingPackageError("kvrecall's server", "serve", name)


def require_math_verify() -> None:
    """Raises MissingPackageError if answers to mathematical problems cannot be compared."""
    for name in ("math_verify", "antlr4"):
        if find_spec(name) is None:
            raise MissingPackageError("math-verify", "eval", name)


_computed = _forked = False
"""Whether this process has computed, and whether it was forked after its parent had. OpenMP's threads do not exist in such a
process: its loops hang, or end the process."""


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

"""Which models are attached in this process: a count, so that contexts may nest."""

from __future__ import annotations

_depth = 0


def active() -> bool:
    """True inside at least one `kvrecall.attach` context."""
    return _depth > 0


def enter() -> bool:
    """Counts one more context; True if it is the first."""
    global _depth
    _depth += 1
    return _depth == 1


def leave() -> bool:
    """Counts one context less; True if it was the last."""
    global _depth
    _depth -= 1
    return _depth == 0

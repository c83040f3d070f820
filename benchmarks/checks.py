"""How a benchmark refuses to time what is wrong, `python -O` or not."""

from __future__ import annotations


class CheckError(AssertionError):
    """What was to be timed does not do what its reference does. The message says what differs, and by how much."""


def require(right: bool, told: str) -> None:
    """Raises CheckError with `told` unless `right`; an assert would be gone under `python -O`, and wrong work be timed."""
    if not right:
        raise CheckError(told)

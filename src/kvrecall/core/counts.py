"""Counts as people write them, in options and environment variables."""

from __future__ import annotations

from operator import index
from typing import Any

from kvrecall.core.errors import ParameterError


def byte_count(text: str, name: str) -> int:
    """Bytes of a text such as 500m (= 500 MiB), 32g, 1t or 1048576. name: what the text was given for, in the error's words.

    Raises ParameterError.
    """
    plain = text.strip().lower().removesuffix("b").removesuffix("i")
    factor = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}.get(plain[-1:], 1)
    count = whole(plain[:-1] if factor > 1 else plain) * factor
    if not 0 <= count < 1 << 63:
        raise ParameterError(name, "bytes such as 500m, 32g or 1t", text, "Give a whole number with its unit.")
    return count


def integer(name: str, value: Any, remedy: str, least: int | None = None) -> int:
    """An integer, or a tensor or array of one, from `least` on. Raises ParameterError for all else, also True and False."""
    try:
        found = index(value)
    except TypeError:
        found = None
    if found is None or isinstance(value, bool) or (least is not None and found < least):
        raise ParameterError(name, "an integer" if least is None else f"an integer >= {least}", value, remedy)
    return found


def whole(text: str) -> int:
    """The number of a text of the digits 0 to 9; -1 for any other, and for more digits than any count has."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else -1

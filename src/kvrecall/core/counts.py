"""Counts as people write them, in options and environment variables."""

from __future__ import annotations

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


def whole(text: str) -> int:
    """The number of a text of the digits 0 to 9; -1 for any other, and for more digits than any count has."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else -1

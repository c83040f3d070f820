"""Long work in pieces: how much of it is done at once is for others to decide, and changes nothing of what it comes to."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import TypeVar

T = TypeVar("T")
Work = Generator[int, None, T]
"""Yields after each piece what the piece was worth, as the work itself counts it, and returns the result."""

PIECE_TOKENS = 4096
"""Tokens per piece: their fp32 logits for 64 queries of 32 heads take 34 MB, and launches are few."""


def stretches(tokens: int, multiple: int = 1) -> Iterator[slice]:
    """0 .. tokens - 1 cut into pieces, in order. multiple: every length but the last is one of this."""
    size = max(1, PIECE_TOKENS // multiple) * multiple
    for start in range(0, tokens, size):
        yield slice(start, min(start + size, tokens))


def finished(work: Work[T]) -> T:
    """Does all of a work at once."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value

"""Long work in pieces: the caller decides how many pieces run at a time; the result does not depend on it."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import TypeVar

T = TypeVar("T")
Work = Generator[int, None, T]
"""A generator that yields the size of each finished piece, in its own unit, and returns the result."""

PIECE_TOKENS = 4096
"""Tokens per piece: their fp32 logits for 64 queries of 32 heads take 34 MB, and launches are few."""


def stretches(tokens: int, multiple: int = 1) -> Iterator[slice]:
    """Cuts 0 .. tokens - 1 into pieces, in order. multiple: every length but the last is a multiple of it."""
    size = max(1, PIECE_TOKENS // multiple) * multiple
    for start in range(0, tokens, size):
        yield slice(start, min(start + size, tokens))


def finished(work: Work[T]) -> T:
    """Runs all pieces and returns the result."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value

"""Long work in pieces: the caller decides how many pieces run at a time; the result does not depend on it."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import TypeVar

import torch

T = TypeVar("T")
Work = Generator[int, None, T]
"""A generator that yields the size of each finished piece, in its own unit, and returns the result."""

PIECE_TOKENS, GPU_PIECE_TOKENS = 4096, 16_384
"""Tokens per piece. 4,096 of them have 34 MB of fp32 logits for 64 queries of 32 heads. On a GPU a piece is some thirty
launches, whose time on the host is the same for more tokens."""


def chunks(tokens: int, device: torch.device, multiple: int = 1) -> Iterator[slice]:
    """Cuts 0 .. tokens - 1 into pieces for a device, in order. multiple: every length but the last is a multiple of it."""
    size = max(1, (GPU_PIECE_TOKENS if device.type == "cuda" else PIECE_TOKENS) // multiple) * multiple
    for start in range(0, tokens, size):
        yield slice(start, min(start + size, tokens))


def run_all(work: Work[T]) -> T:
    """Runs all pieces and returns the result."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value

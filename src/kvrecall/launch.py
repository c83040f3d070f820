"""Sizes of kernel launches."""

from __future__ import annotations


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n (1 for n <= 1)."""
    return 1 << max(0, n - 1).bit_length()

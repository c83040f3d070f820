"""Sizes of kernel launches, and where kernels can be launched at all."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch

LEAST_CAPABILITY = (8, 0)
"""Older GPUs search by torch operations."""


@cache
def kernels_available(device: torch.device) -> bool:
    """Whether Triton kernels run on a device: a CUDA GPU of at least `LEAST_CAPABILITY`, and Triton is installed."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < LEAST_CAPABILITY:
        return False
    return find_spec("triton") is not None


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n (1 for n <= 1)."""
    return 1 << max(0, n - 1).bit_length()

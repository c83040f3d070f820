"""Helpers for kernel launches: supported devices, sizes, and options."""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch

LEAST_CAPABILITY = (8, 0)
"""Least compute capability; bfloat16 needs it."""
_OVERLAPPING = (9, 0)
"""Least compute capability for programmatic dependent launch."""
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of a GPU; (0, 0) for other devices."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


@cache
def kernels_available(device: torch.device) -> bool:
    """Whether Triton's kernels run on a device; otherwise torch does the same more slowly."""
    return capability(device) >= LEAST_CAPABILITY and find_spec("triton") is not None


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n (1 for n <= 1)."""
    return 1 << max(0, n - 1).bit_length()


def overlapping(device: torch.device) -> dict[str, Any]:
    """Launch options of kernels that call `pdl.begin` and `end`."""
    if not INTERPRETED and capability(device) >= _OVERLAPPING:
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}

"""Sizes of kernel launches, and kernels that are launched before the one in front of them has ended."""

from __future__ import annotations

import os
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_OVERLAPPING = (9, 0)
"""Least compute capability for programmatic dependent launches."""


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n (1 for n <= 1)."""
    return 1 << max(0, n - 1).bit_length()


def overlapping(device: torch.device) -> dict[str, Any]:
    """Launch options of kernels that call `begin` first: the way to the GPU overlaps with the kernel in front."""
    if device.type == "cuda" and not INTERPRETED and torch.cuda.get_device_capability(device) >= _OVERLAPPING:
        return {"PDL": 2, "launch_pdl": True}
    return {"PDL": 0}


@triton.jit
def begin(PDL: tl.constexpr):
    """Waits for all that the kernel in front wrote; before any access to memory."""
    if PDL == 1:
        gdc_launch_dependents()
    if PDL:
        gdc_wait()


@triton.jit
def end(PDL: tl.constexpr):
    """Lets the next kernel be launched; what is written afterwards it sees too."""
    if PDL == 2:
        gdc_launch_dependents()

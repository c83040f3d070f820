"""Kernel launches: supported devices, sizes and options, and the compilation of many kernels at once."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from functools import cache, partial
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


_only_compiles: ContextVar[bool] = ContextVar("kvrecall_only_compiles", default=False)


def launch(kernel: Any, grid: Any) -> Callable[..., Any]:
    """`kernel[grid]`, to be called with the kernel's arguments. In `compile_together` it is compiled and does not run."""
    return partial(kernel.warmup, grid=grid) if _only_compiles.get() else kernel[grid]


def compile_together(work: Callable[[], object]) -> None:
    """Compiles all kernels that some work launches, by a thread per core of this process: most of a compilation runs outside of
    Python. None of them runs; whatever else the work does is done, with results that mean nothing. Without Triton, or with one
    that compiles one after the other, it does nothing."""
    if INTERPRETED or find_spec("triton") is None:
        return
    import triton

    if not hasattr(triton, "AsyncCompileMode"):
        return
    before = _only_compiles.set(True)
    try:
        with ThreadPoolExecutor(cpu_cores()) as threads, triton.AsyncCompileMode(threads):
            work()
    finally:
        _only_compiles.reset(before)


def cpu_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def overlapping(device: torch.device) -> dict[str, Any]:
    """Launch options of kernels that call `pdl.begin` and `end`."""
    if not INTERPRETED and capability(device) >= _OVERLAPPING:
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}

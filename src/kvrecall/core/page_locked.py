"""Page-locked memory for small copies between a GPU and the host, and what is told once if the system refuses it."""

from __future__ import annotations

import warnings
from math import prod

import torch
from torch import Tensor

_warned = False


def staging(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Uninitialised CPU tensor for one asynchronous copy to or from a GPU; pageable if pinning is refused.

    From torch's allocator, which reuses the memory when the copy is done.
    """
    try:
        return torch.empty(shape, dtype=dtype, pin_memory=True, device="cpu")
    except RuntimeError as error:
        tell_refusal(prod(shape) * dtype.itemsize, str(error).splitlines()[0])
        return torch.empty(shape, dtype=dtype, device="cpu")


def refused() -> bool:
    """Whether the system has refused page-locked memory in this process."""
    return _warned


def tell_refusal(count: int, reason: str) -> None:
    """Warns once per process, because every layer's pool would give the same warning."""
    global _warned
    if _warned:
        return
    _warned = True
    warnings.warn(
        f"host memory: expected to pin {count:,} bytes, got a refusal ({reason}). Using pageable memory, which is slower; "
        "raise the locked-memory limit (`ulimit -l`) for direct reads by the GPU.",
        RuntimeWarning,
        stacklevel=4,
    )

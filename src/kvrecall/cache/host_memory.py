"""Host memory for KV rows: anonymous pages of exactly the asked size, pinned for the GPU when there is one.

torch's pinned allocator rounds every tensor up to a power of two, which can double the host memory of a long context; an
anonymous mapping registered with CUDA is exact, and untouched pages of it cost nothing.
"""

from __future__ import annotations

import mmap
import warnings
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvrecall.structs import lasting_tensors


def allocate(shape: tuple[int, ...], dtype: torch.dtype, pin: bool) -> Tensor:
    """Uninitialised CPU tensor on its own pages; page-locked and mapped for CUDA when `pin`.

    A system that refuses to pin gives a warning and plain memory: reads by the GPU are then staged, so slower, not wrong.
    """
    count = 1
    for size in shape:
        count *= size
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    pages = mmap.mmap(-1, count * dtype.itemsize)
    with lasting_tensors():
        tensor = torch.frombuffer(pages, dtype=dtype, count=count).view(shape)
    if pin:
        _register(tensor, pages)
    return tensor


def _register(tensor: Tensor, pages: mmap.mmap) -> None:
    cudart: Any = torch.cuda.cudart()
    address = tensor.data_ptr()
    status = int(cudart.cudaHostRegister(address, len(pages), 0))
    if status != 0:
        warnings.warn(
            f"pinning {len(pages):,} bytes of host memory was refused (CUDA error {status}); using pageable memory. "
            "Raise the locked-memory limit (`ulimit -l`) for direct reads by the GPU.",
            RuntimeWarning,
            stacklevel=3,
        )
        return
    # The mapping outlives the tensor's storage only through this callback, which lets go of both in the right order.
    weakref.finalize(tensor.untyped_storage(), _release, address, pages)


def _release(address: int, pages: mmap.mmap) -> None:
    cudart: Any = torch.cuda.cudart()
    cudart.cudaHostUnregister(address)
    del pages


def available_host_bytes() -> int:
    """Bytes the host can still give: the kernel's estimate, lowered to the control group's limit where one is set."""
    available = 2**63 - 1
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    except OSError:
        import os

        if hasattr(os, "sysconf") and "SC_AVPHYS_PAGES" in os.sysconf_names:
            available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            text = Path(limit).read_text().strip()
            if text != "max":
                available = min(available, max(0, int(text) - int(Path(used).read_text())))
        except (OSError, ValueError):
            continue
    return available

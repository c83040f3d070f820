"""Host memory for KV rows: anonymous pages of exactly the asked size, pinned for the GPU when there is one.

torch's pinned allocator rounds every tensor up to a power of two, which can double the host memory of a long context; an
anonymous mapping registered with CUDA is exact, and untouched pages of it cost nothing. It is private, since Linux gives huge
pages to private mappings only (unless `shmem_enabled` says otherwise), and gives small ones to them in a fifth of the time.
"""

from __future__ import annotations

import mmap
import warnings
import weakref
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvrecall.core.structs import lasting_tensors

_PORTABLE_AND_MAPPED = 1 | 2
"""Flags of cudaHostRegister: page-locked for every GPU, also those of other layers, and readable by their kernels."""

_PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
_ADVICE = [getattr(mmap, name) for name in ("MADV_HUGEPAGE", "MADV_DONTFORK") if hasattr(mmap, name)]
"""For memory that is to be page-locked: fewer pages to give and to lock; and none that a forked process shares, for whom the
system would have to copy them all, lest the GPU go on writing to what has become the other one's."""

_warned = False


def allocate(shape: tuple[int, ...], dtype: torch.dtype, pin: bool) -> Tensor:
    """Uninitialised CPU tensor on its own pages; page-locked and mapped for CUDA when `pin`.

    A system that refuses to pin gives plain memory and, once, a warning: reads by the GPU are staged then, slower, not wrong.
    Raises OSError when there is no memory. The pages are given back with the last tensor that views them.
    """
    count = prod(shape)
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    pages = mmap.mmap(-1, count * dtype.itemsize, **_PRIVATE)
    for advice in _ADVICE if pin else ():
        with suppress(OSError):  # a kernel without huge pages: small ones do, they only take longer
            pages.madvise(advice)
    with lasting_tensors():
        tensor = torch.frombuffer(pages, dtype=dtype, count=count).view(shape)
    if pin:
        if not _warned:  # where pinning is refused once, pages are given as they are used
            _fault_in(tensor)
        _register(tensor, pages)
    return tensor


def _fault_in(tensor: Tensor) -> None:
    """Has the system give the pages now, for all cores at a time; registering them would ask for one after another.

    torch divides work among cores by its elements, so that each page has several.
    """
    tensor.view(torch.uint8).view(-1)[:: mmap.PAGESIZE // 8].zero_()


def staging(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Uninitialised CPU tensor for one copy to or from a GPU that nobody waits for; pageable where pinning is refused.

    From torch's allocator, which gives such memory out again when the copy is done.
    """
    try:
        return torch.empty(shape, dtype=dtype, pin_memory=True)
    except RuntimeError as error:
        _warn(prod(shape) * dtype.itemsize, str(error).splitlines()[0])
        return torch.empty(shape, dtype=dtype)


def _register(tensor: Tensor, pages: mmap.mmap) -> None:
    cudart: Any = torch.cuda.cudart()
    address = tensor.data_ptr()
    status = int(cudart.cudaHostRegister(address, len(pages), _PORTABLE_AND_MAPPED))
    if status != 0:
        _warn(len(pages), f"CUDA error {status}")
        if hasattr(mmap, "MADV_DONTNEED"):
            with suppress(OSError):  # they stay, then
                pages.madvise(mmap.MADV_DONTNEED)  # nothing is in them yet
        if torch.cuda.is_available():
            with suppress(RuntimeError):  # a refused call leaves its error behind, which the next launch would take for its own
                torch.zeros(1, device="cuda")
        return
    # The mapping outlives the tensor's storage only through this callback, which lets go of both in the right order.
    release = weakref.finalize(tensor.untyped_storage(), _release, cudart, address, pages)
    release.atexit = False  # the system takes both back, and CUDA may be gone by then


def _release(cudart: Any, address: int, pages: mmap.mmap) -> None:
    bindings: Any = torch._C
    for device in range(torch.cuda.device_count()):
        if bindings._cuda_hasPrimaryContext(device):
            with suppress(RuntimeError):  # a GPU that has failed reads no more
                torch.cuda.synchronize(device)  # copies and kernels that still use the pages
    cudart.cudaHostUnregister(address)
    del pages


def _warn(count: int, reason: str) -> None:
    """Once per process: a cache has a pool for every layer, and all of them would say the same."""
    global _warned
    if _warned:
        return
    _warned = True
    warnings.warn(
        f"host memory: expected to pin {count:,} bytes, got a refusal ({reason}). Using pageable memory wherever that happens, "
        "which is slower; raise the locked-memory limit (`ulimit -l`) for direct reads by the GPU.",
        RuntimeWarning,
        stacklevel=4,
    )


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

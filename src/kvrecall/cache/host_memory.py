"""Host memory for KV rows: address space that never moves, given and page-locked piece by piece from its beginning on.

torch's pinned allocator rounds every tensor up to a power of two, which can double the host memory of a long context; an
anonymous mapping registered with CUDA is exact, and untouched pages of it cost nothing. It is private, since Linux gives huge
pages to private mappings only (unless `shmem_enabled` says otherwise), and gives small ones to them in a fifth of the time.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from math import gcd, prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvrecall.core.structs import lasting_tensors

_PORTABLE_AND_MAPPED = 1 | 2
"""Flags of cudaHostRegister: page-locked for every GPU, also those of other layers, and readable by their kernels."""

_NORESERVE = 0x4000
"""Of Linux, for Pythons that do not name it: address space alone is no promise of memory."""
_FIXED = 0x10
"""Of Linux: a mapping takes the place of what is at its address."""
_ADVICE = [getattr(mmap, name) for name in ("MADV_HUGEPAGE", "MADV_DONTFORK") if hasattr(mmap, name)]
"""For memory that is to be page-locked: fewer pages to give and to lock; and none that a forked process shares. Otherwise the
system would copy them all for the child, or the GPU could write into pages that the child owns by then."""

_warned = False


class Region:
    """A CPU tensor that never moves. Its first pieces are usable, all of it is address space.

    With a GPU, pieces are page-locked and mapped for it as they are given. A system that refuses that gives plain memory and,
    once, a warning: reads by the GPU are staged then, slower, not wrong.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | None = None) -> None:
        """shape: `[most, …]`; pieces are counted along the first dimension. device: the GPU that reads, None for none.
        Raises OSError where there is not so much address space."""
        self._piece = prod(shape[1:]) * dtype.itemsize
        self._step = mmap.PAGESIZE // gcd(mmap.PAGESIZE, self._piece or 1)
        """Memory is given by so many pieces, which are whole pages: no copy may cross the border of two that were page-locked
        one after the other."""
        self._pages = mmap.mmap(-1, max(1, shape[0] * self._piece), **_flags())
        with lasting_tensors():
            self.tensor = torch.frombuffer(self._pages, dtype=dtype, count=prod(shape)).view(shape)
        """All of it; only what was given may be used. Views of it keep the memory."""
        self._device, self._given, self.pinned = device, 0, device is not None
        self._registered: list[int] = []
        if device is not None:
            # The mapping outlives the tensor's storage only through this callback, which lets go of both in the right order.
            storage = self.tensor.untyped_storage()
            release = weakref.finalize(storage, _release, device, self._registered, self._pages)
            release.atexit = False  # the system takes both back, and CUDA may be gone by then

    @property
    def most(self) -> int:
        """Pieces that there is address space for."""
        return self.tensor.shape[0]

    def missing(self, pieces: int) -> int:
        """Bytes that the system has yet to give for the first `pieces`."""
        return max(0, -(-pieces // self._step) * self._step * self._piece - self._given)

    def give(self, pieces: int, fill: Callable[[], None] | None = None) -> None:
        """Makes the first `pieces` usable. fill: writes to all that is new, which need not be touched before then."""
        start, count = self._given, self.missing(pieces)
        if not count:
            return
        if self._device is not None:
            self._lock(start, min(count, len(self._pages) - start), fill)
        elif fill is not None:
            fill()
        self._given += count

    def mappable(self, offset: int) -> bool:
        """Whether bytes of a file from `offset` on can be mapped in the place of pieces: whole pages, which no GPU reads."""
        whole = self._piece % mmap.PAGESIZE == 0 and offset % mmap.ALLOCATIONGRANULARITY == 0
        return whole and self._device is None and sys.platform.startswith("linux")

    def map(self, file: int, offset: int, first: int, pieces: int) -> None:
        """Has the pieces from number `first` on be those of an open file, from byte `offset` on, without reading them. Who
        writes to them changes a copy of the page. The file may be closed and removed, not cut.

        Raises OSError."""
        address = self.tensor.data_ptr() + first * self._piece
        protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _FIXED | _NORESERVE
        map_pages = ctypes.CDLL(None, use_errno=True).mmap
        map_pages.restype = ctypes.c_void_p
        map_pages.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
        if map_pages(address, pieces * self._piece, protection, flags, file, offset) != address:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))

    def mapped(self, pieces: int) -> None:
        """The first `pieces` are usable: they were mapped."""
        self._given = max(self._given, pieces * self._piece)

    def _lock(self, start: int, count: int, fill: Callable[[], None] | None) -> None:
        for advice in _ADVICE:
            with suppress(OSError):  # a kernel without huge pages: small ones do, they only take longer
                self._pages.madvise(advice, start, count)
        with lasting_tensors():
            slab = torch.frombuffer(self._pages, dtype=torch.uint8, count=count, offset=start)
        if fill is not None:
            fill()
        elif not _warned:  # where pinning is refused once, pages are given as they are used
            _fault_in(slab)
        if not _register(slab, self._registered):
            self.pinned = False
            if fill is None and hasattr(mmap, "MADV_DONTNEED"):
                with suppress(OSError):  # they stay, then
                    self._pages.madvise(mmap.MADV_DONTNEED, start, count)  # nothing is in them yet


_TOUCHED_BYTES, _MOST_THREADS = 8 << 20, 16
"""What one thread asks the system for at a time, and how many do: more would wait for its locks."""


def _flags() -> dict[str, int]:
    if not hasattr(mmap, "MAP_PRIVATE"):
        return {}
    known = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return {"flags": known | getattr(mmap, "MAP_NORESERVE", _NORESERVE if sys.platform.startswith("linux") else 0)}


def _fault_in(slab: Tensor) -> None:
    """Has the system give the pages now, to as many threads as there are cores; registering them would ask for one after
    another. Threads of our own: some servers leave torch one."""
    parts = slab.split(_TOUCHED_BYTES)
    if len(parts) == 1:
        _touch(slab)
        return
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with ThreadPoolExecutor(min(_MOST_THREADS, cores, len(parts))) as threads:
        list(threads.map(_touch, parts))


def _touch(part: Tensor) -> None:
    part[:: mmap.PAGESIZE].zero_()


def staging(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Uninitialised CPU tensor for one copy to or from a GPU that nobody waits for; pageable where pinning is refused.

    From torch's allocator, which gives such memory out again when the copy is done.
    """
    try:
        return torch.empty(shape, dtype=dtype, pin_memory=True)
    except RuntimeError as error:
        _warn(prod(shape) * dtype.itemsize, str(error).splitlines()[0])
        return torch.empty(shape, dtype=dtype)


def sent_integers(numbers: list[int], device: torch.device) -> Tensor:
    """int32 `[n]` on a device; the host does not wait for a GPU."""
    near = torch.tensor(numbers, dtype=torch.int32)
    if device.type == "cuda":
        near = staging(tuple(near.shape), near.dtype).copy_(near)
    with lasting_tensors():
        return near.to(device, non_blocking=True)


def _register(slab: Tensor, registered: list[int]) -> bool:
    """Page-locks uint8 `[n]` and adds its address to those that are; False where that is refused."""
    cudart: Any = torch.cuda.cudart()
    address = slab.data_ptr()
    status = int(cudart.cudaHostRegister(address, slab.numel(), _PORTABLE_AND_MAPPED))
    if status == 0:
        registered.append(address)
        return True
    _warn(slab.numel(), f"CUDA error {status}")
    if torch.cuda.is_available():
        with suppress(RuntimeError):  # a refused call leaves its error behind, which the next launch would take for its own
            torch.zeros(1, device="cuda")
    return False


def _release(device: torch.device, registered: list[int], pages: mmap.mmap) -> None:
    """Waits for the one GPU that uses the pages, and unlocks them."""
    bindings: Any = torch._C
    index = device.index or 0
    if registered and index < torch.cuda.device_count() and bindings._cuda_hasPrimaryContext(index):
        with suppress(RuntimeError):  # a GPU that has failed reads no more
            torch.cuda.synchronize(index)  # copies and kernels that still use the pages
    cudart: Any = torch.cuda.cudart() if registered else None
    for address in registered:
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


def total_host_bytes() -> int:
    """Bytes of memory that the machine has; 1 TiB where the system does not tell."""
    names = getattr(os, "sysconf_names", {})
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if "SC_PHYS_PAGES" in names else 1 << 40


def available_host_bytes() -> int:
    """Bytes the host can still give: the kernel's estimate, lowered to the control group's limit where one is set."""
    available = 2**63 - 1
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    except OSError:
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

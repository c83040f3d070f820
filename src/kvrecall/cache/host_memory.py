"""Host memory for KV rows at a fixed address. Memory is added and page-locked piece by piece, from the beginning on.

torch's pinned allocator rounds every tensor up to a power of two, which can double the host memory of a long context. An
anonymous mapping registered with CUDA has the exact size, and untouched pages cost nothing. It is private, because Linux gives
huge pages only to private mappings (unless `shmem_enabled` says otherwise) and gives them small pages in a fifth of the time.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from math import gcd, prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvrecall.core.cuda import refused, tell_refusal
from kvrecall.core.launch import cpu_cores
from kvrecall.core.structs import lasting_tensors

_PORTABLE_AND_MAPPED = 1 | 2
"""Flags of cudaHostRegister: page-locked for every GPU, and readable by kernels."""

_NORESERVE = 0x4000
"""Linux's MAP_NORESERVE, for Pythons without it: address space does not count as memory."""
_FIXED = 0x10
"""Linux's MAP_FIXED: a mapping replaces what is at its address."""
_ADVICE = [getattr(mmap, name) for name in ("MADV_HUGEPAGE", "MADV_DONTFORK") if hasattr(mmap, name)]
"""For page-locked memory: huge pages, which are fewer to lock; and no sharing with forked processes. Otherwise the system would
copy all pages for the child, or the GPU could write into pages that now belong to the child."""


class Region:
    """A CPU tensor that never moves. The first pieces have memory, the others only addresses.

    With a GPU, pieces are page-locked and mapped for it. If the system refuses, they are plain memory, with one warning: then
    the GPU reads by staged copies, which are slower but correct.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | None = None) -> None:
        """shape: `[most, …]`; pieces are counted along the first dimension. device: the GPU that reads, None for none.
        Raises OSError if there is too little address space."""
        self._piece = prod(shape[1:]) * dtype.itemsize
        self._step = mmap.PAGESIZE // gcd(mmap.PAGESIZE, self._piece or 1)
        """Memory grows by multiples of this many pieces, which are whole pages, because no copy may cross the border of two
        parts that were page-locked separately."""
        self._pages = mmap.mmap(-1, max(1, shape[0] * self._piece), **_flags())
        with lasting_tensors():
            self.tensor = torch.frombuffer(self._pages, dtype=dtype, count=prod(shape)).view(shape)
        """The whole tensor; only pieces with memory may be used. Views keep the memory alive."""
        self._device, self._given, self._touched, self.pinned = device, 0, 0, device is not None
        self._registered: list[int] = []
        if device is not None:
            for advice in _ADVICE:
                with suppress(OSError):  # a kernel without huge pages: small ones are slower
                    self._pages.madvise(advice)
            # This callback keeps the mapping alive as long as the tensor's storage, and releases both in the right order.
            storage = self.tensor.untyped_storage()
            release = weakref.finalize(storage, _release, device, self._registered, self._pages)
            release.atexit = False  # at exit the system frees both, and CUDA may be gone already

    @property
    def most(self) -> int:
        """How many pieces there is address space for."""
        return self.tensor.shape[0]

    def missing(self, pieces: int) -> int:
        """Bytes that the first `pieces` still need."""
        return max(0, -(-pieces // self._step) * self._step * self._piece - self._given)

    def commit(self, pieces: int, fill: Callable[[], None] | None = None) -> None:
        """Gives memory to the first `pieces`. fill: writes all new pieces, so that they need not be touched before."""
        start, count = self._given, self.missing(pieces)
        if not count:
            return
        if self._device is not None:
            self._lock(start, min(count, len(self._pages) - start), fill)
        elif fill is not None:
            fill()
        self._given += count

    def mappable(self, offset: int) -> bool:
        """Whether a file can be mapped from byte `offset` on: only whole pages, and only without a GPU."""
        whole = self._piece % mmap.PAGESIZE == 0 and offset % mmap.ALLOCATIONGRANULARITY == 0
        return whole and self._device is None and sys.platform.startswith("linux")

    def map(self, file: int, offset: int, first: int, pieces: int) -> None:
        """Maps pieces from number `first` on to an open file from byte `offset` on, without reading. Writes go to a private
        copy of the page. The file may be closed and removed, but not shortened.

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
        """Records that the first `pieces` are mapped."""
        self._given = max(self._given, pieces * self._piece)

    def _untouched(self, stop: int) -> Tensor:
        """The pages before byte `stop` that the system has not given yet, uint8 `[n]`; whoever asks touches them."""
        start = max(self._touched, self._given)
        self._touched = stop = max(start, min(stop, len(self._pages)))
        with lasting_tensors():
            return torch.frombuffer(self._pages, dtype=torch.uint8)[start:stop]

    def _lock(self, start: int, count: int, fill: Callable[[], None] | None) -> None:
        with lasting_tensors():
            slab = torch.frombuffer(self._pages, dtype=torch.uint8, count=count, offset=start)
        if fill is not None:
            fill()
            self._touched = max(self._touched, start + count)
        elif not refused():  # once pinning was refused, pages are allocated when they are used
            _touch([self._untouched(start + count)])
        index = None if self._device is None else self._device.index
        with nullcontext() if index is None else torch.cuda.device(index):  # a thread begins with the first GPU
            registered = _register(slab, self._registered)
        if not registered:
            self.pinned = False
            if fill is None:
                self.give_back(start)

    def give_back(self, start: int | None = None) -> None:
        """Gives pages back to the system that were touched and hold nothing, from byte `start` on, by default those behind the
        pieces with memory."""
        start = self._given if start is None else start
        if self._touched > start and hasattr(mmap, "MADV_DONTNEED"):
            with suppress(OSError):  # then they stay allocated
                self._pages.madvise(mmap.MADV_DONTNEED, start, self._touched - start)
            self._touched = start


def touch(regions: Iterable[Region], pieces: int) -> None:
    """Lets the system give pages for the first `pieces` of some regions, before `commit` locks them: most of the work, and no
    GPU waits for it. Pieces with memory keep what they hold. Without a GPU pages are given when they are used."""
    if not refused():
        locked = [region for region in regions if region._device is not None]
        _touch([region._untouched(region._given + region.missing(pieces)) for region in locked])


_TOUCHED_BYTES, _MOST_THREADS = 8 << 20, 16
"""Bytes per request of a thread, and most threads: more would wait for the system's locks."""


def _flags() -> dict[str, int]:
    if not hasattr(mmap, "MAP_PRIVATE"):
        return {}
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return {"flags": flags | getattr(mmap, "MAP_NORESERVE", _NORESERVE if sys.platform.startswith("linux") else 0)}


def _touch(pages: Iterable[Tensor]) -> None:
    """Writes to all pages, uint8 `[n]` each, by several threads, since registering would allocate them one after another. By
    own threads, since some servers leave torch only one."""
    parts = [part for each in pages if len(each) for part in each.split(_TOUCHED_BYTES)]
    if parts:
        with ThreadPoolExecutor(min(_MOST_THREADS, cpu_cores(), len(parts))) as threads:
            list(threads.map(lambda part: part[:: mmap.PAGESIZE].zero_(), parts))


def _register(slab: Tensor, registered: list[int]) -> bool:
    """Page-locks uint8 `[n]` and adds its address to `registered`; False if refused."""
    cudart: Any = torch.cuda.cudart()
    address = slab.data_ptr()
    status = int(cudart.cudaHostRegister(address, slab.numel(), _PORTABLE_AND_MAPPED))
    if status == 0:
        registered.append(address)
        return True
    tell_refusal(slab.numel(), f"CUDA error {status}")
    if torch.cuda.is_available():
        with suppress(RuntimeError):  # clears the error, which the next launch would report otherwise
            torch.zeros(1, device="cuda", dtype=torch.float32)
    return False


def _release(device: torch.device, registered: list[int], pages: mmap.mmap) -> None:
    """Waits for the GPU that uses the pages, then unlocks them."""
    bindings: Any = torch._C
    index = device.index or 0
    if registered and index < torch.cuda.device_count() and bindings._cuda_hasPrimaryContext(index):
        with suppress(RuntimeError):  # a failed GPU reads nothing
            torch.cuda.synchronize(index)  # copies and kernels that still use the pages
    cudart: Any = torch.cuda.cudart() if registered else None
    for address in registered:
        cudart.cudaHostUnregister(address)
    del pages


def total_host_bytes() -> int:
    """Memory of the machine in bytes; 1 TiB if the system does not say."""
    names = getattr(os, "sysconf_names", {})
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if "SC_PHYS_PAGES" in names else 1 << 40


def available_host_bytes() -> int:
    """Available host memory in bytes: the kernel's estimate, at most the rest of the control group's limit."""
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

"""Device memory at a fixed address that grows piece by piece: first address space, then memory from its beginning on.

A captured step holds addresses, so a tensor that it reads must not move when it grows. CUDA can reserve addresses without
memory and map memory to them later (virtual memory management). On a CPU an ordinary mapping does the same.
"""

from __future__ import annotations

import ctypes
import weakref
from math import prod
from typing import Any

import torch

from kvrecall.cache.host_memory import Region, available_host_bytes, total_host_bytes
from kvrecall.core.cuda import check, cuda_driver
from kvrecall.core.errors import DeviceError
from kvrecall.core.structs import lasting_tensors

_OUT_OF_MEMORY = 2
"""Value of CUresult."""
_SUPPORTED = 102
"""Value of CUdevice_attribute: virtual memory management."""
_PINNED, _DEVICE, _READ_WRITE = 1, 1, 3
"""Values of CUmemAllocationType, CUmemLocationType and CUmemAccess_flags."""


SPARE_BYTES = 1 << 30
"""Bytes of a GPU that rows leave free for activations, workspaces and CUDA graphs."""


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32", ctypes.c_void_p),
        ("compression", ctypes.c_ubyte),
        ("rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    ]


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = [("location", _Location), ("flags", ctypes.c_int)]


class DeviceRegion:
    """A GPU tensor that never moves. The first pieces have memory, the others only addresses."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        """shape: `[most, …]`; pieces are counted along the first dimension. Raises DeviceError if the GPU or its driver
        has no virtual memory management, torch.OutOfMemoryError if there is no memory for the first bytes."""
        self._device, self._piece = device, prod(shape[1:]) * dtype.itemsize
        self._mapping = _Mapping(prod(shape) * dtype.itemsize, device)
        self._mapping.commit(1)  # torch asks the driver for the device of an address, which needs memory there
        with lasting_tensors():
            whole = torch.as_tensor(self._mapping, device=device)
            self.tensor = whole[: prod(shape) * dtype.itemsize].view(dtype).view(shape)
        """The whole tensor; only pieces with memory may be used. Views keep the memory alive."""

    @property
    def most(self) -> int:
        """How many pieces there is address space for."""
        return self.tensor.shape[0]

    def missing(self, pieces: int) -> int:
        """Bytes that the first `pieces` still need."""
        return self._mapping.missing(pieces * self._piece)

    def commit(self, pieces: int) -> None:
        """Gives memory to the first `pieces`. Raises torch.OutOfMemoryError; earlier pieces stay usable."""
        self._mapping.commit(pieces * self._piece)


def region(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Region | DeviceRegion:
    """Memory of a device at a fixed address, as a tensor of this shape."""
    return DeviceRegion(shape, dtype, device) if device.type == "cuda" else Region(shape, dtype)


def has_own_memory(device: torch.device) -> bool:
    """Whether a device has memory of its own, besides the host's."""
    return device.type == "cuda"


def total_bytes(device: torch.device) -> int:
    """Total memory of a device, in bytes."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else total_host_bytes()


def free_device_bytes(device: torch.device) -> int:
    """Free memory of a device in bytes, including torch's unused reserve."""
    if device.type != "cuda":
        return available_host_bytes()
    reserve = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + reserve


def room_for_rows(device: torch.device) -> int:
    """Device memory that is left for keys and values, in bytes."""
    return free_device_bytes(device) - (SPARE_BYTES if device.type == "cuda" else 0)


class _Mapping:
    """Bytes of a GPU. Tensors made from it keep it alive."""

    def __init__(self, count: int, device: torch.device) -> None:
        self._index = torch.cuda.current_device() if device.index is None else device.index
        torch.empty(1, device=device, dtype=torch.float32)  # the driver calls below need a context
        self._driver = driver = cuda_driver()
        supported = ctypes.c_int()
        driver.cuDeviceGetAttribute(ctypes.byref(supported), _SUPPORTED, self._index)
        if not supported.value:
            raise DeviceError("GPU", "one with virtual memory management", torch.cuda.get_device_name(self._index))
        location = _Location(_DEVICE, self._index)
        self._properties = _Properties(type=_PINNED, location=location)
        self._access = _Access(location, _READ_WRITE)
        step = ctypes.c_size_t()
        check(driver.cuMemGetAllocationGranularity(ctypes.byref(step), ctypes.byref(self._properties), 0))
        self._step, self._given = step.value, 0
        self._count = -(-max(1, count) // self._step) * self._step
        address = ctypes.c_uint64()
        check(driver.cuMemAddressReserve(ctypes.byref(address), ctypes.c_size_t(self._count), 0, 0, 0))
        self._address = address.value
        self._parts: list[tuple[int, int, int]] = []
        release = weakref.finalize(self, _release, self._index, self._address, self._count, self._parts)
        release.atexit = False  # at exit the system frees everything, and CUDA may be gone already

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self._count,), "typestr": "|u1", "data": (self._address, False), "version": 3}

    def missing(self, count: int) -> int:
        return max(0, -(-count // self._step) * self._step - self._given)

    def commit(self, count: int) -> None:
        more = self.missing(count)
        if not more:
            return
        status, handle = self._create(more)
        if status == _OUT_OF_MEMORY:  # torch may hold unused memory
            torch.cuda.empty_cache()
            status, handle = self._create(more)
        if status == _OUT_OF_MEMORY:
            free = torch.cuda.mem_get_info(self._index)[0]
            raise torch.OutOfMemoryError(f"CUDA out of memory: {more:,} bytes were asked for, {free:,} are free")
        check(status)
        start, driver = self._address + self._given, self._driver
        mapped = driver.cuMemMap(ctypes.c_uint64(start), ctypes.c_size_t(more), ctypes.c_size_t(0), handle, ctypes.c_uint64(0))
        if mapped:
            driver.cuMemRelease(handle)
            check(mapped)
        self._parts.append((start, more, handle.value))
        self._given += more
        size = ctypes.c_size_t(1)
        check(driver.cuMemSetAccess(ctypes.c_uint64(start), ctypes.c_size_t(more), ctypes.byref(self._access), size))

    def _create(self, count: int) -> tuple[int, ctypes.c_uint64]:
        handle = ctypes.c_uint64()
        arguments = ctypes.byref(handle), ctypes.c_size_t(count), ctypes.byref(self._properties), ctypes.c_uint64(0)
        return int(self._driver.cuMemCreate(*arguments)), handle


def _release(index: int, address: int, count: int, parts: list[tuple[int, int, int]]) -> None:
    """Waits for the GPU that uses the memory, then frees it."""
    torch.cuda.synchronize(index)
    driver = cuda_driver()
    for start, size, handle in parts:
        driver.cuMemUnmap(ctypes.c_uint64(start), ctypes.c_size_t(size))
        driver.cuMemRelease(ctypes.c_uint64(handle))
    driver.cuMemAddressFree(ctypes.c_uint64(address), ctypes.c_size_t(count))

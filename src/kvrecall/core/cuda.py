"""Copies between a GPU and the host: page-locked memory for small ones, CUDA's driver for many runs at a time.

torch would start one copy per run of bytes, each of which takes time of the host. `copy_2d` copies runs at equal distances by
one call of the driver, which is loaded by ctypes.
"""

from __future__ import annotations

import ctypes
import sys
import warnings
from functools import cache
from math import prod
from typing import Any

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


@cache
def cuda_driver() -> Any:
    """The driver's library. Raises OSError if there is none."""
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


def check(status: int) -> None:
    """Raises RuntimeError, with the driver's text, for a CUresult that is an error."""
    if status:
        text = ctypes.c_char_p()
        cuda_driver().cuGetErrorString(status, ctypes.byref(text))
        raise RuntimeError(f"CUDA error {status}: {(text.value or b'unknown').decode()}")


_HOST, _DEVICE = 1, 2
"""Values of CUmemorytype."""
_INVALID_CONTEXT = 201
"""Value of CUresult."""
_MOST_PITCH = 2**31 - 1
"""CU_DEVICE_ATTRIBUTE_MAX_PITCH of all GPUs, in bytes."""


class Copy2D(ctypes.Structure):
    """CUDA_MEMCPY2D. Pitches and the width are bytes; the height is the number of runs."""

    _fields_ = [
        *(
            (f"{end}_{field}", kind)
            for end in ("source", "target")
            for field, kind in (
                ("x", ctypes.c_size_t), ("y", ctypes.c_size_t), ("type", ctypes.c_int), ("host", ctypes.c_void_p),
                ("device", ctypes.c_uint64), ("array", ctypes.c_void_p), ("pitch", ctypes.c_size_t),
            )
        ),
        ("width", ctypes.c_size_t), ("height", ctypes.c_size_t),
    ]  # fmt: skip


def copy_2d(source: Tensor, target: Tensor) -> bool:
    """Starts copying source `[H, …]` to target, on the current stream of the GPU. The host does not wait.

    Returns False, and copies nothing, if one call cannot do it. It can if one tensor is on an NVIDIA GPU and the other in
    page-locked host memory, both have the same shape and dtype, H > 1, each of the H runs is contiguous, and neither a run
    nor the distance between two exceeds 2^31 - 1 bytes. Raises RuntimeError if the driver reports an error.

    The caller must keep both tensors until the copy is done. torch's allocator of page-locked memory is not told of the copy.
    """
    copy = _described(source, target)
    if copy is None:
        return False
    gpu = _gpu(source, target)
    if gpu is None:
        return False
    index, is_target = gpu
    if is_target:
        copy.source_type, copy.source_host = _HOST, source.data_ptr()
        copy.target_type, copy.target_device = _DEVICE, target.data_ptr()
    else:
        copy.source_type, copy.source_device = _DEVICE, source.data_ptr()
        copy.target_type, copy.target_host = _HOST, target.data_ptr()
    _start(copy, index)
    return True


def _described(source: Tensor, target: Tensor) -> Copy2D | None:
    """The copy without its addresses; None if it has another form than one call copies."""
    shape, strides, others = source.shape, source.stride(), target.stride()
    if shape[0] < 2 or shape != target.shape or source.dtype != target.dtype:
        return None
    run = 1
    for size, stride, other in zip(shape[:0:-1], strides[:0:-1], others[:0:-1], strict=True):
        if size != 1 and not stride == other == run:
            return None
        run *= size
    size = source.itemsize
    width, pitch, other_pitch = run * size, strides[0] * size, others[0] * size
    if not 0 < width <= min(pitch, other_pitch) <= max(pitch, other_pitch) <= _MOST_PITCH:
        return None
    return Copy2D(source_pitch=pitch, target_pitch=other_pitch, width=width, height=shape[0])


def _gpu(source: Tensor, target: Tensor) -> tuple[int, bool] | None:
    """The number of the GPU, and whether the target is on it; None unless the other tensor is in page-locked host memory."""
    gpu, host = (target, source) if target.is_cuda else (source, target)
    if not gpu.is_cuda or host.is_cuda or _function() is None or not host.is_pinned():
        return None
    return gpu.get_device(), gpu is target


def _start(copy: Copy2D, index: int) -> None:
    """Starts a copy on a GPU's current stream."""
    if torch.cuda.current_device() != index:
        with torch.cuda.device(index):
            return _start(copy, index)
    bindings: Any = torch._C
    stream = bindings._cuda_getCurrentRawStream(index)  # `torch.cuda.current_stream` would make an object on every call
    status = _function()(ctypes.byref(copy), stream)
    if status == _INVALID_CONTEXT:  # a thread in which nothing was called that needs a context
        context = ctypes.c_void_p()  # the GPU's, which torch keeps as long as the process
        check(cuda_driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), index))
        check(cuda_driver().cuCtxSetCurrent(context))
        status = _function()(ctypes.byref(copy), stream)
    check(status)


@cache
def _function() -> Any:
    """The driver's cuMemcpy2DAsync; None without a driver of NVIDIA."""
    if torch.version.hip is not None:
        return None
    try:
        function = cuda_driver().cuMemcpy2DAsync_v2
    except (OSError, AttributeError):
        return None
    function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_void_p], ctypes.c_int
    return function


_ALIGNED = 16
"""Bytes between the beginnings of tensors that are copied as one; every dtype fits."""


class HostCopy:
    """Copies of tensors that may lie on a GPU, as they are when its work so far is done. What it does later changes nothing."""

    def __init__(self, *tensors: Tensor) -> None:
        """Starts the copies, behind the work of the tensors' current stream."""
        self._copies = [staging(tuple(x.shape), x.dtype).copy_(x, non_blocking=True) if x.is_cuda else x for x in tensors]
        self._done: torch.cuda.Event | None = None
        if device := next((tensor.device for tensor in tensors if tensor.is_cuda), None):
            self._done = torch.cuda.Event()
            self._done.record(torch.cuda.current_stream(device))

    def wait(self) -> list[Tensor]:
        """The tensors on the CPU, in order; those that lay there are not copied."""
        if self._done is not None:
            self._done.synchronize()
        return self._copies

    def ready(self) -> list[Tensor] | None:
        """As `wait`, but None if a copy is not done. The host never waits."""
        return self._copies if self._done is None or self._done.query() else None


def to_device(device: torch.device, *tensors: Tensor) -> list[Tensor]:
    """CPU tensors on a device. To a GPU they go by one copy, which the host does not wait for."""
    if device.type != "cuda":
        return [tensor.to(device) for tensor in tensors]
    return unpacked(packed(*tensors).to(device, non_blocking=True), *tensors)


def packed(*tensors: Tensor) -> Tensor:
    """CPU tensors one behind the other in page-locked memory, uint8 `[n]`."""
    sizes = [-(-tensor.nbytes // _ALIGNED) * _ALIGNED for tensor in tensors]
    memory = staging((sum(sizes),), torch.uint8)
    for part, tensor in zip(unpacked(memory, *tensors), tensors, strict=True):
        part.copy_(tensor)
    return memory


def unpacked(memory: Tensor, *like: Tensor) -> list[Tensor]:
    """Views of what `packed` returns, which may have moved to a device; like: tensors of the shapes and dtypes."""
    parts, start = list[Tensor](), 0
    for tensor in like:
        part = memory[start : start + tensor.nbytes]
        parts.append(part.view(tensor.dtype).view(tensor.shape))
        start += -(-tensor.nbytes // _ALIGNED) * _ALIGNED
    return parts

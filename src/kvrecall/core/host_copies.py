"""Small copies between a GPU and the host. They start at once, and the host waits for all of them together, or not at all."""

from __future__ import annotations

import torch
from torch import Tensor

from kvrecall.core.page_locked import staging

_ALIGNED = 16
"""Bytes between the beginnings of tensors that are copied as one; every dtype fits."""


class HostCopy:
    """Copies of tensors that may lie on a GPU, as they are when its work so far is done. What it does later changes nothing."""

    def __init__(self, *tensors: Tensor) -> None:
        """Starts the copies, behind the work of the tensors' current stream."""
        self._near, self._done = list[Tensor](), None
        for tensor in tensors:
            near = tensor
            if tensor.is_cuda:
                near = staging(tuple(tensor.shape), tensor.dtype).copy_(tensor, non_blocking=True)
            self._near.append(near)
        if device := next((tensor.device for tensor in tensors if tensor.is_cuda), None):
            self._done = torch.cuda.Event()
            self._done.record(torch.cuda.current_stream(device))

    def wait(self) -> list[Tensor]:
        """The tensors on the CPU, in order; those that lay there are not copied."""
        if self._done is not None:
            self._done.synchronize()
        return self._near

    def ready(self) -> list[Tensor] | None:
        """As `wait`, but None if a copy is not done. The host never waits."""
        return self._near if self._done is None or self._done.query() else None


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

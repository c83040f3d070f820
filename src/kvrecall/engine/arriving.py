"""Copies numbers from a device to the host, which waits only for the copy, not for later work."""

from __future__ import annotations

import torch
from torch import Tensor

from kvrecall.core.page_locked import staging


class Arriving:
    """A copy of a tensor to the host that has begun."""

    def __init__(self, numbers: Tensor) -> None:
        self._near, self._there = numbers, None
        if numbers.is_cuda:
            self._near = staging(tuple(numbers.shape), numbers.dtype).copy_(numbers, non_blocking=True)
            self._there = torch.cuda.current_stream(numbers.device).record_event()

    def tolist(self) -> list[int]:
        """The numbers; waits for the copy."""
        if self._there is not None:
            self._there.synchronize()
        return self._near.tolist()

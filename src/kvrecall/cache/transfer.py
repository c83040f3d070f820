"""Copies of rows between device and host. Copies to the host run on a separate stream, and the host does not wait.

Readers wait first for the copy's event: a GPU's stream, or the CPU.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from kvrecall.cache.prefetch import copy_heads
from kvrecall.core.fp8 import SmallRows, StoredRows


class Pending:
    """The last copy to one memory. Immutable, so forks may share it."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._device, self._done = stream.device, torch.cuda.Event()
        self._done.record(stream)

    def wait_on_device(self) -> None:
        """Makes the GPU's current stream wait for the copy; the host goes on."""
        torch.cuda.current_stream(self._device).wait_event(self._done)

    def wait_on_host(self) -> None:
        """Returns when the rows have arrived."""
        self._done.synchronize()

    def arrived(self) -> bool:
        """Whether the copy is done."""
        return self._done.query()


def send(rows: StoredRows, target: StoredRows) -> Pending:
    """Starts copying rows `[H_kv, n, 2, D]` of a GPU into host memory of the same shape and form, after the earlier work of its
    current stream.

    The rows must not be written to afterwards; their memory is kept until the copy is done. The target's is not: see
    `copy_heads`.
    """
    stream = _stream(rows.device)
    # The copy must also wait for reads of the target's old content (before a crop).
    stream.wait_stream(torch.cuda.current_stream(rows.device))
    with torch.cuda.stream(stream):
        copy_heads(rows, target)
    for part in (rows,) if isinstance(rows, Tensor) else (rows.numbers, rows.scales):
        part.record_stream(stream)
    return Pending(stream)


def bring(block: StoredRows, device: torch.device) -> Tensor:
    """Rows `[H_kv, n, 2, D]` in the model's dtype on the device; from the host by `copy_heads`, whose rule for the host's
    memory holds. Rows in eight bits are widened on the device."""
    if isinstance(block, SmallRows):
        if block.device == device or device.type != "cuda":
            return block.wide().to(device)
        near = block.empty_on(device)
        copy_heads(block, near)
        return near.wide()
    if block.device == device or device.type != "cuda":
        return block.to(device)
    near = torch.empty(block.shape, dtype=block.dtype, device=device)
    copy_heads(block, near)
    return near


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)

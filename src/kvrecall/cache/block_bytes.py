"""Summaries of one layer in blocks on its device. Only the index knows the layout of a block."""

from __future__ import annotations

from collections.abc import Callable
from threading import RLock

import torch
from torch import Tensor

from kvrecall.cache.device_memory import region, total_bytes
from kvrecall.cache.host_memory import Region, available_host_bytes
from kvrecall.core.errors import HostMemoryError
from kvrecall.core.launch import cdiv

_SLAB_BYTES = 4 << 20
"""Memory grows by at least this many bytes."""


class BlockBytes:
    """Bytes `[blocks, block_bytes]` on a device, at a fixed address. Memory grows with the block ids.

    Sequences that share blocks may belong to several threads.
    """

    def __init__(self, block_bytes: int, block_size: int, device: torch.device) -> None:
        """block_size: tokens of a block. Raises torch.OutOfMemoryError if a GPU has no memory for the first block."""
        self._block_size = block_size
        self._region = region((cdiv(total_bytes(device), block_bytes), block_bytes), torch.uint8, device)
        self.tensor: Tensor = self._region.tensor
        """uint8 `[most blocks, block_bytes]`; only blocks with memory may be used."""
        self._blocks, self._lock = 0, RLock()

    @property
    def block_bytes(self) -> int:
        """Bytes per block."""
        return self.tensor.shape[1]

    @property
    def given(self) -> int:
        """How many blocks have memory: those below this id."""
        return self._blocks

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self._block_size

    def give(self, blocks: int) -> None:
        """Gives memory to the blocks below id `blocks`. If memory is short, changes nothing and raises torch.OutOfMemoryError
        on a GPU, HostMemoryError on a CPU."""
        if blocks > self._blocks:
            with self._lock:
                self._give(blocks)

    def _give(self, blocks: int) -> None:
        if blocks <= self._blocks:
            return
        wanted = max(blocks, min(self._region.most, self._blocks + cdiv(_SLAB_BYTES, self.block_bytes)))
        if self.tensor.device.type == "cpu":
            self._give_on_host(wanted)
        elif wanted > self._region.most:
            raise torch.OutOfMemoryError(f"CUDA out of memory: {wanted:,} blocks of {self.block_bytes:,} bytes")
        else:
            self._region.give(wanted)
        self._blocks = wanted

    def _give_on_host(self, wanted: int) -> None:
        need, available, tokens = (
            self._region.missing(wanted),
            available_host_bytes(),
            (wanted - self._blocks) * self._block_size,
        )
        if wanted > self._region.most or need > available:
            raise HostMemoryError(need, available, tokens)
        try:
            self._region.give(wanted)
        except (OSError, MemoryError) as error:
            raise HostMemoryError(need, available, tokens) from error

    def cleared(self, block: int, place: int, tokens: int) -> Tensor:
        """A copy of a block's bytes, uint8 `[block_bytes]` on the CPU. The block is number `place` of a sequence; bytes that do
        not belong to the sequence's first `tokens` tokens are zero."""
        raise NotImplementedError(type(self).__name__)

    def admit(self, blocks: int, fill: Callable[[], None], mapped: bool = False) -> None:
        """Gives memory to the blocks below id `blocks`, in an empty memory, and calls `fill` to write them. mapped: `fill` maps
        them from a file instead, so that they take no memory. Raises as `give`."""
        with self._lock:
            region = self._region
            if not isinstance(region, Region):
                self.give(blocks)
                fill()
            elif mapped:
                fill()
                region.mapped(blocks)
            else:
                need, available = region.missing(blocks), available_host_bytes()
                if blocks > region.most or need > available:
                    raise HostMemoryError(need, available, blocks * self._block_size)
                region.give(blocks, fill)
            self._blocks = max(self._blocks, blocks)

    @property
    def region(self) -> Region | None:
        """Its memory if it is host memory, else None."""
        return self._region if isinstance(self._region, Region) else None

    def copy_block(self, source: int, target: int, tokens: int) -> None:
        """Copies all bytes of a block, over whose parts its tokens are spread; does nothing for blocks that this layer has
        never used."""
        if source < self._blocks:
            self.give(target + 1)
            self.tensor[target].copy_(self.tensor[source])

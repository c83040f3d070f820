"""K and V of one layer's blocks in host memory."""

from __future__ import annotations

from math import prod
from threading import RLock

import torch
from torch import Tensor

from kvrecall.cache.host_memory import Region, available_host_bytes, total_host_bytes
from kvrecall.cache.transfer import Pending, send
from kvrecall.core.errors import HostMemoryError
from kvrecall.core.launch import cdiv

_SLAB_TOKENS = 4096
"""Memory is asked for in pieces of so many tokens at least."""


class BlockRows:
    """Rows `[blocks, H_kv, block_size, K|V, D]` at one address for as long as they live, page-locked where a GPU reads them.

    Memory is given as block ids rise. Rows of a GPU are still on their way when a copy was asked for: who reads waits first.
    Sequences that share blocks may belong to several threads.
    """

    def __init__(self, heads: int, block_size: int, dim: int, dtype: torch.dtype, device: torch.device) -> None:
        """device: of the layer, which reads the rows."""
        shape = heads, block_size, 2, dim
        self._region = _reserved(shape, dtype, device if device.type == "cuda" else None)
        self.tensor = self._region.tensor
        self.block_size, self.device = block_size, device
        self._pending: Pending | None = None  # the last copy from the GPU; copies arrive in order
        self._blocks, self._lock = 0, RLock()

    @property
    def pinned(self) -> bool:
        """Whether a GPU can read the rows where they lie."""
        return self._region.pinned

    def give(self, blocks: int) -> None:
        """Makes the blocks below id `blocks` usable. Raises HostMemoryError, and changes nothing, where memory is short."""
        if blocks > self._blocks:
            with self._lock:
                self._give(blocks)

    def _give(self, blocks: int) -> None:
        if blocks <= self._blocks:
            return
        wanted, available = max(blocks, self._blocks + cdiv(_SLAB_TOKENS, self.block_size)), available_host_bytes()
        if wanted > self._region.most or self._region.missing(wanted) > available:
            wanted = blocks
        need = self._region.missing(wanted)
        if wanted > self._region.most or need > available:
            raise HostMemoryError(need, available, (blocks - self._blocks) * self.block_size)
        try:
            self._region.give(wanted)
        except (OSError, MemoryError) as error:
            raise HostMemoryError(need, available, (wanted - self._blocks) * self.block_size) from error
        self._blocks = wanted

    def copy_block(self, source: int, target: int) -> None:
        """Copies the rows of a block once they are there; nothing where no row of this layer was ever in it."""
        if source >= self._blocks:
            return
        self.give(target + 1)
        self.arrive()
        if self.device.type == "cuda" and torch.cuda.is_initialized():  # kernels may still read what was in the target before
            torch.cuda.current_stream(self.device).synchronize()
        self.tensor[target].copy_(self.tensor[source])

    def arrive(self, on_device: bool = False) -> None:
        """Rows may be read from now on, by the CPU or by the current stream of the GPU."""
        pending = self._pending
        if pending is None:
            return
        if on_device and not pending.arrived():
            pending.wait_on_device()
            return
        pending.wait_on_host()
        with self._lock:
            if self._pending is pending:
                self._pending = None

    def store(self, rows: Tensor, block: int, offset: int) -> None:
        """Stores rows `[H_kv, n, 2, D]` of any device in a block; a GPU's are on their way then."""
        target = self.tensor[block][:, offset : offset + rows.shape[1]]
        if rows.is_cuda:
            with self._lock:  # the copy that was asked for last is the one to wait for
                self._pending = send(rows, target)
        else:
            target.copy_(rows)


def _reserved(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | None) -> Region:
    """Address space for as many blocks as the machine's memory could hold, or fewer where the process may not have so much."""
    block_bytes = prod(shape) * dtype.itemsize
    blocks = cdiv(total_host_bytes(), block_bytes)
    while True:
        try:
            return Region((blocks, *shape), dtype, device)
        except (OSError, MemoryError) as error:
            if blocks == 1:
                raise HostMemoryError(block_bytes, available_host_bytes(), shape[1]) from error
            blocks //= 2

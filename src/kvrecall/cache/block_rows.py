"""Memory of one layer's blocks, which grows with their ids: K and V on the host or the device, and summaries on the device."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from threading import RLock

import torch
from torch import Tensor

from kvrecall.cache.copies import rows_to_host
from kvrecall.cache.device_memory import DeviceRegion, free_device_bytes, region, room_for_rows, total_bytes
from kvrecall.cache.host_memory import Region, available_host_bytes, total_host_bytes
from kvrecall.core.errors import DeviceError, HostMemoryError
from kvrecall.core.fp8 import Fp8Rows, StoredRows, block_nbytes, block_of, dequantised, numbers_of, quantised, scales_of
from kvrecall.core.launch import cdiv
from kvrecall.core.structs import lasting_tensors

_SLAB_TOKENS = 4096
"""Memory grows by at least this many tokens."""

_SLAB_BYTES = 4 << 20
"""Memory of summaries grows by at least this many bytes."""

_warned = False


def _commit_on_host(region: Region | DeviceRegion, blocks: int, tokens: int, fill: Callable[[], None] | None = None) -> None:
    """Gives memory to the first `blocks` pieces of host memory; fill: see `Region.commit`. Raises HostMemoryError, which names
    the number of tokens that the memory is for, before anything changes."""
    need, available = region.missing(blocks), available_host_bytes()
    if blocks > region.most or need > available:
        raise HostMemoryError(need, available, tokens)
    if fill is not None:
        assert isinstance(region, Region)
        region.commit(blocks, fill)
        return
    try:
        region.commit(blocks)
    except (OSError, MemoryError) as error:
        raise HostMemoryError(need, available, tokens) from error


class BlockMemory(ABC):
    """Memory of one layer in blocks of `block_size` tokens. Sequences that share blocks may belong to several threads."""

    block_size: int
    block_bytes: int
    """Bytes per block; of rows in eight bits, those that they would take in the dtype of the model."""

    def __init__(self) -> None:
        self._lock = RLock()

    @property
    @abstractmethod
    def tensor(self) -> Tensor:
        """All blocks, `[most blocks, …]`; only blocks with memory may be used."""

    @property
    @abstractmethod
    def region(self) -> Region | None:
        """Its memory if it is host memory, else None."""

    @abstractmethod
    def commit(self, blocks: int) -> None:
        """Gives memory to the blocks below id `blocks`; raises and changes nothing if memory is short."""

    @abstractmethod
    def _count(self, blocks: int) -> None:
        """Records that the blocks below id `blocks` have memory."""

    @abstractmethod
    def cleared(self, block: int, place: int, tokens: int) -> Tensor:
        """A copy of a block on the CPU. The block is number `place` of a sequence; what does not belong to the sequence's first
        `tokens` tokens is zero."""

    @abstractmethod
    def copy_block(self, source: int, target: int, tokens: int) -> None:
        """Copies at least the first `tokens` tokens of block `source` to block `target`."""

    def load(self, blocks: int, fill: Callable[[], None], mapped: bool = False) -> None:
        """Gives memory to the blocks below id `blocks`, in an empty memory, and calls `fill` to write them. mapped: `fill` maps
        them from a file instead, so that they take no memory. Raises as `commit`."""
        with self._lock:
            region = self.region
            if region is None:
                self.commit(blocks)
                fill()
                return
            if mapped:
                fill()
                region.mapped(blocks)
            else:
                _commit_on_host(region, blocks, blocks * self.block_size, fill)
            self._count(blocks)


class BlockBytes(BlockMemory):
    """Summaries: bytes `[blocks, block_bytes]` on a device, at a fixed address. Only the index knows the layout of a block."""

    def __init__(self, block_bytes: int, block_size: int, device: torch.device) -> None:
        """block_size: tokens of a block. Raises torch.OutOfMemoryError if a GPU has no memory for the first block."""
        super().__init__()
        self.block_size, self.block_bytes = block_size, block_bytes
        self._region = region((cdiv(total_bytes(device), block_bytes), block_bytes), torch.uint8, device)
        self.committed = 0
        """How many blocks have memory: those below this id."""

    @property
    def tensor(self) -> Tensor:
        """uint8 `[most blocks, block_bytes]`."""
        return self._region.tensor

    def commit(self, blocks: int) -> None:
        """Gives memory to the blocks below id `blocks`. If memory is short, changes nothing and raises torch.OutOfMemoryError
        on a GPU, HostMemoryError on a CPU."""
        if blocks <= self.committed:
            return
        with self._lock:
            if blocks <= self.committed:  # by another thread
                return
            wanted = max(blocks, min(self._region.most, self.committed + cdiv(_SLAB_BYTES, self.block_bytes)))
            if self.tensor.device.type == "cpu":
                _commit_on_host(self._region, wanted, (wanted - self.committed) * self.block_size)
            elif wanted > self._region.most:
                raise torch.OutOfMemoryError(f"CUDA out of memory: {wanted:,} blocks of {self.block_bytes:,} bytes")
            else:
                self._region.commit(wanted)
            self.committed = wanted

    def _count(self, blocks: int) -> None:
        self.committed = max(self.committed, blocks)

    @property
    def region(self) -> Region | None:
        return self._region if isinstance(self._region, Region) else None

    def copy_block(self, source: int, target: int, tokens: int) -> None:
        """Copies all bytes of a block, over whose parts its tokens are spread; does nothing for blocks that this layer has
        never used."""
        if source < self.committed:
            self.commit(target + 1)
            self.tensor[target].copy_(self.tensor[source])


@dataclass
class _Place:
    """Where the rows lie.

    blocks: how many have memory. fp8: for rows in eight bits, views of all blocks, `[most blocks, H_kv, block_size, 2, D]`.
    """

    region: Region | DeviceRegion
    on_device: bool
    blocks: int = 0
    fp8: Fp8Rows | None = None


class BlockRows(BlockMemory):
    """Rows `[blocks, H_kv, block_size, K|V, D]`, in host memory, page-locked for a GPU, or on the layer's device.

    Memory grows with the block ids. Rows keep their address, with one exception: if the device has no memory for further
    blocks, all rows move to the host and stay there. The old tensor may still be read by those who hold it. Copies from a GPU
    to the host may be in flight, so every reader waits for them first. Sequences that share blocks may belong to several
    threads.
    """

    def __init__(
        self, heads: int, block_size: int, dim: int, dtype: torch.dtype, device: torch.device, on_device: bool = False,
        mapped: int = 0, fp8: bool = False,
    ) -> None:  # fmt: skip
        """device: the layer's device, which reads the rows. on_device: rows lie there, if it has memory. mapped: most blocks
        that may be mapped from a file; address space is reserved for them in addition. fp8: rows are in eight bits while they
        lie in host memory (`core.fp8`)."""
        super().__init__()
        self.shape, self.dtype = (heads, block_size, 2, dim), dtype
        """H_kv, block_size, 2, D; dtype of rows that are not in eight bits."""
        self._mapped, self._fp8 = mapped, fp8
        self.block_size, self.block_bytes, self.device = block_size, prod(self.shape) * dtype.itemsize, device
        memory = self._reserved_on_device() if on_device else None
        self._place = self._reserved_on_host() if memory is None else _Place(memory, True)
        self._pending: torch.cuda.Event | None = None  # the end of the last copy from the GPU; copies arrive in order

    @property
    def tensor(self) -> Tensor:
        """All blocks, `[most blocks, H_kv, block_size, K|V, D]`, or uint8 `[most blocks, n]` in eight bits; only blocks with
        memory may be used."""
        return self._place.region.tensor

    @property
    def rows(self) -> Tensor:
        """`[most blocks, H_kv, block_size, K|V, D]`; in eight bits e4m3, with the scales behind each block
        (`core.fp8.scales_of`)."""
        place = self._place
        return place.region.tensor if place.fp8 is None else place.fp8.numbers

    @property
    def fp8(self) -> bool:
        """Whether rows are in eight bits. They never are while they lie on the device."""
        return self._fp8 and not self.on_device

    def stored(self, rows: Tensor) -> StoredRows:
        """Rows `[H_kv, n, 2, D]` as they are stored, on their device."""
        return quantised(rows) if self.fp8 else rows

    def block(self, block: int, start: int, stop: int) -> StoredRows:
        """Rows start .. stop - 1 of a block, `[H_kv, n, 2, D]`, as views."""
        return self._part(self._place, block, start, stop)

    def _part(self, place: _Place, block: int, start: int, stop: int) -> StoredRows:
        if place.fp8 is None:
            return place.region.tensor[block, :, start:stop]
        return place.fp8.both(lambda x: x[block, :, start:stop])

    @property
    def on_device(self) -> bool:
        """Whether the rows lie on the layer's device, and not in host memory."""
        return self._place.on_device

    @property
    def pinned(self) -> bool:
        """Whether a GPU can read the rows in place."""
        where = self._place.region
        return where.pinned if isinstance(where, Region) else True

    def commit(self, blocks: int) -> None:
        """Gives memory to the blocks below id `blocks`. If the device refuses, all rows move to the host.

        Raises HostMemoryError, and changes nothing, if host memory is short.
        """
        if blocks > self._place.blocks:
            with self._lock:
                if not self.try_commit(blocks):
                    self._move(blocks)

    def try_commit(self, blocks: int) -> bool:
        """As `commit`, but if the device refuses, returns False and moves nothing."""
        with self._lock:
            place = self._place
            if blocks > place.blocks:
                if not place.on_device:
                    self._commit(place, blocks)
                elif not self._commit_on_device(place, blocks):
                    return False
            return True

    def _commit(self, place: _Place, blocks: int) -> None:
        """`commit` for host memory."""
        wanted = max(blocks, place.blocks + cdiv(_SLAB_TOKENS, self.block_size))
        if wanted > place.region.most or place.region.missing(wanted) > available_host_bytes():
            wanted = blocks
        _commit_on_host(place.region, wanted, (wanted - place.blocks) * self.block_size)
        place.blocks = wanted

    def _commit_on_device(self, place: _Place, blocks: int) -> bool:
        """`commit` for device memory; returns whether there was enough."""
        for wanted in (max(blocks, place.blocks + cdiv(_SLAB_TOKENS, self.block_size)), blocks):
            if wanted > place.region.most or place.region.missing(wanted) > room_for_rows(self.device):
                continue
            try:
                place.region.commit(wanted)
            except (torch.OutOfMemoryError, OSError, MemoryError):
                continue
            place.blocks = wanted
            return True
        return False

    def _move(self, blocks: int) -> None:
        """Moves all rows to the host, with room for `blocks` blocks."""
        before, after = self._place, self._reserved_on_host()
        self._commit(after, max(blocks, before.blocks))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # streams of other threads may still write
        for block in range(before.blocks):
            rows = before.region.tensor[block]
            _copy(quantised(rows) if self._fp8 else rows, self._part(after, block, 0, self.block_size))
        self._place = after
        say_not_on_device(before.region.missing(blocks), self.device)

    def cleared(self, block: int, place: int, tokens: int) -> Tensor:
        """A copy of a block on the CPU, `[H_kv, block_size, 2, D]`, or uint8 `[n]` in eight bits. The block is number `place`
        of a sequence; rows that do not belong to the sequence's first `tokens` tokens are zero."""
        self.wait()
        count = min(self.block_size, tokens - place * self.block_size)
        if count == self.block_size:
            return self.tensor[block].cpu()
        if not self.fp8:
            copy = torch.zeros(self.shape, dtype=self.dtype, device="cpu")
            copy[:, :count] = self.tensor[block][:, :count]
            return copy
        rows = self.block(block, 0, self.block_size)
        assert isinstance(rows, Fp8Rows)
        copied = rows.both(Tensor.clone)
        copied.numbers.view(torch.uint8)[:, count:] = 0
        copied.scales[:, count:] = 0
        return block_of(copied)

    def _count(self, blocks: int) -> None:
        self._place.blocks = max(self._place.blocks, blocks)

    @property
    def region(self) -> Region | None:
        return self._place.region if isinstance(self._place.region, Region) and not self.on_device else None

    def copy_block(self, source: int, target: int, tokens: int) -> None:
        """Copies the first `tokens` rows of a block after they have arrived; does nothing for blocks that this layer has never
        used."""
        if source >= self._place.blocks:
            return
        with self._lock:
            self.commit(target + 1)
            self.wait()
            # Kernels may still read the target's old content. On the device the stream's order is enough.
            if not self.on_device and self.device.type == "cuda" and torch.cuda.is_initialized():
                torch.cuda.current_stream(self.device).synchronize()
            _copy(self.block(source, 0, tokens), self.block(target, 0, tokens))

    def wait(self, on_device: bool = False) -> None:
        """Waits for copies, so that the CPU, or the GPU's current stream, may read rows."""
        pending = self._pending
        if pending is None:
            return
        if on_device and not pending.query():
            pending.wait(torch.cuda.current_stream(self.device))
            return
        pending.synchronize()
        with self._lock:
            if self._pending is pending:
                self._pending = None

    def store(self, rows: StoredRows, block: int, offset: int) -> None:
        """Stores rows `[H_kv, n, 2, D]` of any device, from `stored`, in a block. For rows of a GPU the copy may still be in
        flight."""
        with self._lock:  # rows must not move meanwhile, and `_pending` must be the last copy
            # Rows may have moved to the host since `stored`.
            rows = quantised(rows) if self.fp8 and isinstance(rows, Tensor) else rows
            rows = rows if self.fp8 else dequantised(rows)
            target = self.block(block, offset, offset + rows.shape[1])
            if rows.is_cuda and not self.on_device:
                self._pending = rows_to_host(rows, target)
            else:
                _copy(rows, target)

    def _reserved_on_host(self) -> _Place:
        """Reserves address space for as many blocks as host memory could hold, or fewer if the process may not have so much."""
        block_bytes = block_nbytes(self.shape) if self._fp8 else self.block_bytes
        blocks = self._mapped + cdiv(total_host_bytes(), block_bytes)
        device = self.device if self.device.type == "cuda" else None
        while True:
            try:
                if not self._fp8:
                    return _Place(Region((blocks, *self.shape), self.dtype, device), False)
                memory = Region((blocks, block_bytes), torch.uint8, device)
                break
            except (OSError, MemoryError) as error:
                if blocks == 1:
                    raise HostMemoryError(block_bytes, available_host_bytes(), self.block_size) from error
                blocks //= 2
        with lasting_tensors():
            numbers = numbers_of(memory.tensor, self.shape)
            return _Place(memory, False, fp8=Fp8Rows(numbers, scales_of(numbers), self.dtype))

    def _reserved_on_device(self) -> Region | DeviceRegion | None:
        """The same on the device; None if it has no memory of its own, or no virtual memory management."""
        try:
            return region((cdiv(total_bytes(self.device), self.block_bytes), *self.shape), self.dtype, self.device)
        except (torch.OutOfMemoryError, DeviceError, OSError, MemoryError):
            say_not_on_device(self.block_bytes, self.device)
            return None


def _copy(rows: StoredRows, target: StoredRows) -> None:
    """Copies rows `[H_kv, n, 2, D]` to others in the same form."""
    if isinstance(rows, Tensor) or isinstance(target, Tensor):
        assert isinstance(rows, Tensor) and isinstance(target, Tensor), "rows in different forms"
        target.copy_(rows)
    else:
        target.numbers.view(torch.uint8).copy_(rows.numbers.view(torch.uint8))
        target.scales.copy_(rows.scales)


def say_not_on_device(need: int, device: torch.device) -> None:
    """Warns once per process that a layer without search has its rows in host memory."""
    global _warned
    if _warned:
        return
    _warned = True
    warnings.warn(
        f"device memory: expected room on {device} for {need:,} bytes of keys and values of a layer that searches nothing, "
        f"got {free_device_bytes(device):,} bytes free. Its rows lie in host memory, and every step brings all of them over "
        "the bus; use a method that searches, fewer tokens or a smaller batch.",
        RuntimeWarning,
        stacklevel=2,
    )

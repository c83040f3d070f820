"""Blocks of tokens: ids that mean the same in every layer, how many sequences use each, and the block table of a sequence.

A block holds the rows of `block_size` consecutive tokens after the sink. Its id addresses them in the memory of every layer.
Sequences share blocks (forks, beams, several answers to one prompt). A shared block is copied before one of them writes to
it. Unused blocks are given out again.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable
from threading import RLock
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from kvrecall.core.errors import ParameterError
from kvrecall.core.launch import cdiv
from kvrecall.core.structs import lasting_tensors, sent_integers

BLOCK_TOKENS = 1024
"""Default of tokens per block with a GPU."""
CPU_BLOCK_TOKENS = 4096
"""Default on a CPU, which attends block by block; unwritten parts of a block take no memory there."""
_LEAST, _MOST = 16, 4096


_Memory = TypeVar("_Memory")


class BlockPool:
    """Block ids shared by caches of a model; thread-safe."""

    def __init__(self, block_size: int = BLOCK_TOKENS) -> None:
        """block_size: tokens per block, a power of two from 16 to 4,096."""
        if not _LEAST <= block_size <= _MOST or block_size.bit_count() != 1:
            expected = f"a power of two from {_LEAST} to {_MOST:,}"
            raise ParameterError("block_size", expected, block_size, "It is the number of tokens of a block.")
        self.block_size = block_size
        self.memories: WeakValueDictionary[Hashable, Any] = WeakValueDictionary()
        """Memories of the layers (`block_rows.BlockMemory`): rows, and the summaries of each method. A memory lives as long as
        it is used."""
        self._users: list[int] = []
        self._free: list[int] = []  # a heap: low ids first, so that memory grows as late as possible
        self._returned: list[int] = []
        self._lock = RLock()

    def memory(self, key: Hashable, make: Callable[[], _Memory]) -> _Memory:
        """The memory named `key`, made if it does not exist. All users of a name need the same class and shape."""
        with self._lock:
            memory = self.memories.get(key)
            if memory is None:
                memory = self.memories[key] = make()
            return memory

    @property
    def used(self) -> int:
        """How many blocks are in use."""
        with self._lock:
            self._collect()
            return len(self._users) - len(self._free)

    def adopt(self, tables: list[list[int]]) -> list[BlockTable]:
        """Block tables with these ids, in a pool that has given out none. The tables must use all ids 0 .. n - 1."""
        with self._lock:
            assert not self._users, "the pool is in use"
            self._users = [0] * (1 + max((block for blocks in tables for block in blocks), default=-1))
            adopted = [BlockTable(self) for _ in tables]
            for table, blocks in zip(adopted, tables, strict=True):
                table.blocks = list(blocks)
                self.share(blocks)
            assert all(self._users), "a block that no table uses"
            return adopted

    @property
    def named(self) -> int:
        """How many ids exist, used or not."""
        return len(self._users)

    def take(self) -> int:
        """Takes an unused block; it has one user now. Returns its id."""
        with self._lock:
            self._collect()
            if self._free:
                block = heapq.heappop(self._free)
                self._users[block] = 1
                return block
            self._users.append(1)
            return len(self._users) - 1

    def share(self, blocks: list[int]) -> None:
        """Adds one user to each block."""
        with self._lock:
            for block in blocks:
                self._users[block] += 1

    def below(self, blocks: int) -> int:
        """An upper bound on the ids of the next `blocks` blocks to be taken, if nobody else takes or releases any meanwhile."""
        with self._lock:
            self._collect()
            if blocks > len(self._free):
                return len(self._users) + blocks - len(self._free)
            return max(heapq.nsmallest(blocks, self._free), default=-1) + 1

    def release(self, blocks: list[int]) -> None:
        """Removes one user of each block. Takes no lock, because a garbage-collected table may call it at any moment."""
        self._returned.extend(blocks)

    def shared(self, block: int) -> bool:
        """Whether a block has several users."""
        with self._lock:
            self._collect()
            return self._users[block] > 1

    def copied(self, block: int, tokens: int) -> int:
        """A new block with one user and a copy of `block`'s first `tokens` tokens in every layer."""
        target = self.take()
        try:
            for memory in list(self.memories.values()):
                memory.copy_block(block, target, tokens)
        except BaseException:
            self.release([target])
            raise
        return target

    def _collect(self) -> None:
        while self._returned:
            block = self._returned.pop()
            self._users[block] -= 1
            if not self._users[block]:
                heapq.heappush(self._free, block)


class BlockTable:
    """The blocks of one sequence in order, for all layers. Each layer records how many tokens it holds."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool, self.blocks = pool, list[int]()
        self.lengths: dict[int, int] = {}
        """Tokens that each layer holds, by the layer's number."""
        self.unchanged: dict[int, int] = {}
        """How many first tokens of each layer are unchanged, with their summaries, since the sequence was saved; by the
        layer's number. The next save writes only the others."""
        self._by_device: dict[torch.device, Tensor] = {}

    def __del__(self) -> None:
        self.pool.release(self.blocks)

    @property
    def beginning(self) -> tuple[int, int] | None:
        """Equal for tables whose first block is the same; None without blocks."""
        return (id(self.pool), self.blocks[0]) if self.blocks else None

    def set_length(self, layer: int, tokens: int) -> None:
        """Records that a layer holds `tokens` tokens."""
        self.lengths[layer] = tokens
        if self.unchanged.get(layer, 0) > tokens:
            self.unchanged[layer] = tokens

    def saved(self) -> None:
        """Records that the current content has been saved."""
        self.unchanged = dict(self.lengths)

    def ensure_blocks(self, start: int, stop: int) -> list[int]:
        """The blocks of tokens start .. stop - 1 for writing: shared ones are copied, missing ones are taken."""
        size = self.pool.block_size
        while len(self.blocks) * size < stop:
            self._by_device = {}
            self.blocks.append(self.pool.take())
        for place in range(start // size, cdiv(stop, size)):
            block = self.blocks[place]
            if self.pool.shared(block):
                copy = self.pool.copied(block, min(size, max(0, self._tokens() - place * size)))
                self._by_device = {}
                self.unchanged = {layer: min(count, place * size) for layer, count in self.unchanged.items()}
                self.blocks[place] = copy  # before the release, so that a table never names a released block
                self.pool.release([block])
        return self.blocks[start // size : cdiv(stop, size)]

    def release_unused(self) -> None:
        """Gives up the blocks in which no layer holds a token."""
        used = self._held()
        if used < len(self.blocks):
            self._by_device = {}
            gone = self.blocks[used:]
            del self.blocks[used:]
            self.pool.release(gone)

    def fork(self) -> BlockTable:
        """A table for a copy of the sequence, which shares the blocks."""
        other = BlockTable(self.pool)
        blocks = self.blocks[: self._held()]
        self.pool.share(blocks)
        other.blocks, other.lengths, other.unchanged = blocks, dict(self.lengths), dict(self.unchanged)
        return other

    def on(self, device: torch.device) -> Tensor:
        """The table int32 `[blocks]` on a device, cached until it changes. Read-only."""
        if device not in self._by_device:
            self._by_device[device] = sent_integers(self.blocks, device)
        return self._by_device[device]

    def _held(self) -> int:
        return cdiv(self._tokens(), self.pool.block_size)

    def _tokens(self) -> int:
        return max(self.lengths.values(), default=0)


def stacked(tables: list[BlockTable], device: torch.device) -> Tensor:
    """int32 `[B, W]` on a device, as `HostTable.blocks`."""
    with lasting_tensors():
        return torch.nn.utils.rnn.pad_sequence([table.on(device) for table in tables], batch_first=True)


def block_tables(sequences: int, device: torch.device) -> list[BlockTable]:
    """Tables for `sequences` new sequences of layers on a device, in a new pool."""
    pool = BlockPool(block_size_on(device))
    return [BlockTable(pool) for _ in range(sequences)]


def block_size_on(device: torch.device) -> int:
    """Default of tokens per block for a device."""
    return CPU_BLOCK_TOKENS if device.type == "cpu" else BLOCK_TOKENS

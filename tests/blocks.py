"""Host rows in blocks: tables built by hand, zones and stores of small blocks, and memory whose unwritten rows are NaN."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvrecall.cache.block_rows import BlockRows
from kvrecall.cache.blocks import BlockPool, BlockTable
from kvrecall.cache.host_memory import Region
from kvrecall.cache.layer import LayerStore
from kvrecall.cache.zone_rows import ZoneRows
from kvrecall.cache.zones import ZoneSizes
from kvrecall.core import fp8
from kvrecall.core.structs import HostTable
from tests.strategies import generator

CPU = torch.device("cpu")
SIZES = ZoneSizes(4, 16, 8)


def host_table(stored: list[Tensor], block_size: int, device: str = "cpu", seed: int = 0) -> HostTable:
    """Rows `[H_kv, n, 2, D]` of each sequence in blocks of one memory, in shuffled order; all other rows are NaN.

    device: where the table is read. Rows are page-locked for a GPU. Two blocks belong to nobody.
    """
    heads, _, _, dim = stored[0].shape
    counts = [-(-rows.shape[1] // block_size) for rows in stored]
    order = torch.randperm(sum(counts) + 2, generator=generator(seed))
    memory = torch.full((len(order), heads, block_size, 2, dim), float("nan"), dtype=stored[0].dtype)
    blocks, taken = torch.zeros(len(stored), max(counts), dtype=torch.int32), 0
    for b, rows in enumerate(stored):
        for place, part in enumerate(rows.split(block_size, 1)):
            memory[order[taken], :, : part.shape[1]] = part
            blocks[b, place] = order[taken]
            taken += 1
    return HostTable(memory if device == "cpu" else memory.pin_memory(), blocks.to(device))


def in_eight_bits(table: HostTable) -> HostTable:
    """The same rows in eight bits; those that are NaN stay NaN."""
    blocks = [fp8.block_of(fp8.quantised(block)) for block in table.rows]
    held = torch.stack(blocks)
    held = held.pin_memory() if table.rows.is_pinned() else held
    return HostTable(fp8.numbers_of(held, tuple(table.rows.shape[1:])), table.blocks, table.rows.dtype)


def overwrite(table: HostTable, sequence: int, ids: Tensor, number: float) -> None:
    """Fills the rows of the tokens `ids` int64 `[n]` on the CPU with a number, in all heads."""
    table.rows[table.blocks[sequence].cpu()[ids // table.block_size].long(), :, ids % table.block_size] = number


def store(
    sequences: int,
    heads: int,
    dim: int,
    dtype: torch.dtype,
    device: str = "cpu",
    block_size: int = 64,
    sizes: ZoneSizes = SIZES,
    on_device: bool = False,
    small: bool = False,
) -> Any:
    """An empty store of one layer; its `host` are the retrieval zones. small: in eight bits on the host."""
    with pytest.MonkeyPatch.context() as patch:
        small_blocks(patch, block_size)
        return LayerStore(sequences, heads, dim, dtype, torch.device(device), sizes, on_device=on_device, fp8=small)


def zone_of(
    heads: int, dim: int, dtype: torch.dtype = torch.float32, device: torch.device = CPU, block_size: int = 16,
    on_device: bool = False, small: bool = False,
) -> ZoneRows:  # fmt: skip
    """An empty zone in blocks of its own, of a layer on `device`. on_device: where its rows lie. small: in eight bits on the
    host."""
    pool = BlockPool(block_size)
    rows = pool.memories[0] = BlockRows(heads, block_size, dim, dtype, device, on_device, fp8=small)
    return ZoneRows(0, rows, BlockTable(pool))


def fork(zone: ZoneRows) -> ZoneRows:
    """A copy of the sequence, as a store makes one."""
    return zone.view(zone.block_table.fork())


def scattered(zone: ZoneRows, tokens: int, seed: int = 0) -> None:
    """Gives an empty zone blocks for so many tokens whose ids do not ascend, and memory for them."""
    zone.ensure_blocks(tokens)
    table = zone.block_table
    order = torch.randperm(len(table.blocks), generator=torch.Generator().manual_seed(seed)).tolist()
    table.blocks[:] = [table.blocks[i] for i in order]


def filled(rows: Tensor, device: torch.device = CPU, block_size: int = 16, small: bool = False) -> ZoneRows:
    """A zone with rows `[H_kv, n, 2, D]`, in blocks whose ids do not ascend."""
    zone = zone_of(rows.shape[0], rows.shape[3], rows.dtype, device, block_size, small=small)
    scattered(zone, rows.shape[1])
    zone.append(rows)
    return zone


def small_blocks(monkeypatch: pytest.MonkeyPatch, block_size: int = 16) -> None:
    """Blocks of caches that nobody gives a size, and memory asked for block by block."""
    monkeypatch.setattr(BlockPool.__init__, "__defaults__", (block_size,))
    for name in ("BLOCK_TOKENS", "CPU_BLOCK_TOKENS"):
        monkeypatch.setattr(f"kvrecall.cache.blocks.{name}", block_size)
    monkeypatch.setattr("kvrecall.cache.block_rows._SLAB_TOKENS", block_size)


class Device:
    """A CPU whose memory counts as that of a device: layers that search nothing keep their rows there, while it gives any.

    refusing: from which demand for memory on it refuses; None: it gives whatever is asked for.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, refusing: int | None = None) -> None:
        self.refusing, self.demands = refusing, 0
        for module in ("layer.state", "backends.transformers.layer", "backends.transformers.cache"):
            monkeypatch.setattr(f"kvrecall.{module}.has_own_memory", lambda _: True)
        monkeypatch.setattr("kvrecall.cache.block_rows.room_for_rows", self.room)
        monkeypatch.setattr("kvrecall.cache.block_rows._warned", True)

    def room(self, device: torch.device) -> int:
        """Bytes that it gives."""
        self.demands += 1
        return 1 << 60 if self.refusing is None or self.demands < self.refusing else 0


def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was not written is NaN, or bytes of ones, as which numbers are NaN, too."""
    commit = Region.commit

    def poisoned(self: Region, pieces: int) -> None:
        before = self._given // self._piece
        commit(self, pieces)
        self.tensor[before:pieces].fill_(float("nan") if self.tensor.is_floating_point() else 255)

    monkeypatch.setattr(Region, "commit", poisoned)

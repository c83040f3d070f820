"""Host rows for tests: small blocks, and memory whose unwritten rows are NaN."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvrecall.cache.block_rows import BlockRows
from kvrecall.cache.blocks import BlockPool, BlockTable
from kvrecall.cache.host_memory import Region
from kvrecall.cache.zone_rows import ZoneRows

CPU = torch.device("cpu")


def zone_of(
    heads: int, dim: int, dtype: torch.dtype = torch.float32, device: torch.device = CPU, block_size: int = 16
) -> ZoneRows:
    """An empty zone in blocks of its own, of a layer on `device`."""
    pool = BlockPool(block_size)
    rows = pool.memories[0] = BlockRows(heads, block_size, dim, dtype, device)
    return ZoneRows(0, rows, BlockTable(pool))


def fork(zone: ZoneRows) -> ZoneRows:
    """A copy of the sequence, as a store makes one."""
    return zone.view(zone.blocks_of_all_layers.fork())


def scattered(zone: ZoneRows, tokens: int, seed: int = 0) -> None:
    """Gives an empty zone blocks for so many tokens whose ids do not ascend, and memory for them."""
    zone.reach(tokens)
    table = zone.blocks_of_all_layers
    order = torch.randperm(len(table.blocks), generator=torch.Generator().manual_seed(seed)).tolist()
    table.blocks[:] = [table.blocks[i] for i in order]


def filled(rows: Tensor, device: torch.device = CPU, block_size: int = 16) -> ZoneRows:
    """A zone with rows `[H_kv, n, 2, D]`, in blocks whose ids do not ascend."""
    zone = zone_of(rows.shape[0], rows.shape[3], rows.dtype, device, block_size)
    scattered(zone, rows.shape[1])
    zone.append(rows)
    return zone


def small_blocks(monkeypatch: pytest.MonkeyPatch, block_size: int = 16) -> None:
    """Blocks of caches that nobody gives a size, and memory asked for block by block."""
    monkeypatch.setattr(BlockPool.__init__, "__defaults__", (block_size,))
    monkeypatch.setattr("kvrecall.cache.block_rows._SLAB_TOKENS", block_size)


def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was not written is NaN."""
    give = Region.give

    def poisoned(self: Region, pieces: int) -> None:
        before = self._given // self._piece
        give(self, pieces)
        self.tensor[before:pieces].fill_(float("nan"))

    monkeypatch.setattr(Region, "give", poisoned)

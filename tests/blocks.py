"""Host rows in blocks: tables built by hand, and zones of their own for tests that need no layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvrecall.core.structs import HostTable
from tests.strategies import generator


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
            block = int(order[taken])
            memory[block, :, : part.shape[1]] = part
            blocks[b, place] = block
            taken += 1
    return HostTable(memory if device == "cpu" else memory.pin_memory(), blocks.to(device))


def overwrite(table: HostTable, sequence: int, ids: Tensor, number: float) -> None:
    """Fills the rows of the tokens `ids` int64 `[n]` on the CPU with a number, in all heads."""
    table.rows[table.blocks[sequence].cpu()[ids // table.block_size].long(), :, ids % table.block_size] = number


def zones(sequences: int, heads: int, dim: int, dtype: torch.dtype, device: str = "cpu", block_size: int = 64) -> list[Any]:
    """Empty retrieval zones, as layers have them."""
    from kvrecall.cache.blocks import BlockPool, BlockTable
    from kvrecall.cache.layer import LayerStore
    from kvrecall.cache.zones import ZoneSizes

    pool = BlockPool(block_size)
    tables = [BlockTable(pool) for _ in range(sequences)]
    return LayerStore(sequences, heads, dim, dtype, torch.device(device), ZoneSizes(4, 16, 8), 0, tables).host

"""Host rows in blocks: tables built by hand, and stores of small blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvrecall.cache.layer import LayerStore
from kvrecall.cache.zones import ZoneSizes
from kvrecall.core.structs import HostTable
from tests.strategies import generator

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


def overwrite(table: HostTable, sequence: int, ids: Tensor, number: float) -> None:
    """Fills the rows of the tokens `ids` int64 `[n]` on the CPU with a number, in all heads."""
    table.rows[table.blocks[sequence].cpu()[ids // table.block_size].long(), :, ids % table.block_size] = number


def small_blocks(monkeypatch: pytest.MonkeyPatch, block_size: int = 16) -> None:
    """Stores that are made from now on have blocks of so few tokens."""
    monkeypatch.setattr("kvrecall.cache.blocks.BlockPool.__init__.__defaults__", (block_size,))


def store(
    sequences: int,
    heads: int,
    dim: int,
    dtype: torch.dtype,
    device: str = "cpu",
    block_size: int = 64,
    sizes: ZoneSizes = SIZES,
) -> Any:
    """An empty store of one layer; its `host` are the retrieval zones."""
    with pytest.MonkeyPatch.context() as patch:
        small_blocks(patch, block_size)
        return LayerStore(sequences, heads, dim, dtype, torch.device(device), sizes)

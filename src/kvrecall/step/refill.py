"""Fills pages of the window of a sequence that begins behind filled blocks, from their rows on the host."""

# Kernel launches take arguments that type checkers do not know.
# pyright: reportCallIssue=false

from __future__ import annotations

from torch import Tensor

from kvrecall.core.launch import cdiv, launch
from kvrecall.step.stream import RowBlocks

_NUMBERS = 2048
"""Numbers that a program copies."""


def refill(rows: Tensor, places: Tensor, host: RowBlocks) -> None:
    """Copies the rows of blocks to pages. rows: `[pages, H_kv, block_size, 2, D]`. places: int32 `[n, 2]`, page and block.

    Runs on the current stream; a GPU reads the host's memory itself. Bytes: 4 D per token and KV head, in 16-bit types.
    """
    if rows.device.type == "cuda":
        from kvrecall.step.kernels import refill_kernel

        numbers = rows[0].numel()
        launch(refill_kernel, (cdiv(numbers, _NUMBERS), len(places)))(
            rows, *host.pool, places, numbers, N=_NUMBERS, num_warps=4
        )
        return
    for page, block in places.tolist():
        rows[page] = host.run(block, 1)[0]

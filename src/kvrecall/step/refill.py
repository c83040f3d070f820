"""Restores the window of a sequence that begins behind filled blocks, from their rows."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kvrecall.step.stream import HostBlocks


def refill(rows: Tensor, pages: Sequence[int], host: HostBlocks, blocks: Sequence[int], start: int, stop: int) -> None:
    """Writes the window's pages of tokens start .. stop - 1 of a sequence, the last one completely.

    rows: `[pages, H_kv, page_tokens, 2 D]`. pages: of the sequence, 0 for none. blocks: of the sequence; a page lies
    within one. Copies run on the current stream; the host does not wait.
    """
    size, block_size = rows.shape[2], host.block_size
    assert block_size % size == 0
    copies: dict[int, Tensor] = {}
    for first in range(start // size * size, stop, size):
        page, block = pages[first // size], blocks[first // block_size]
        if not page:
            continue
        if block not in copies:  # the whole block, which is contiguous
            copies = {block: host.rows[block].to(rows.device, non_blocking=True).flatten(-2)}
        at = first % block_size
        rows[page] = copies[block][:, at : at + size]

"""Restores pages of the window of a sequence that begins behind filled blocks, from their rows."""

# Kernel launches take arguments that type checkers do not know.
# pyright: reportCallIssue=false

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from kvrecall.core.launch import cdiv, launch, next_power_of_2
from kvrecall.step.stream import RowBlocks

Unfilled = tuple[int, int, int]
"""A page, the block that has its rows, and the place of its first row there."""


def unfilled(
    pages: Sequence[int], blocks: Sequence[int], page_tokens: int, block_size: int, start: int, stop: int,
    numbers: Iterable[int] | None = None,
) -> list[Unfilled]:  # fmt: skip
    """Pages of tokens start .. stop - 1 of a sequence; only the pages with these numbers, if they are told.

    pages: of the sequence, 0 for none. blocks: of the sequence; a page lies within one.
    """
    assert block_size % page_tokens == 0
    if numbers is None:
        numbers = range(start // page_tokens, cdiv(stop, page_tokens))
    firsts = [(pages[number], number * page_tokens) for number in numbers]
    return [(page, blocks[first // block_size], first % block_size) for page, first in firsts if page]


def refill(rows: Tensor, places: Tensor, host: RowBlocks) -> None:
    """Fills pages, all rows of each. rows: `[pages, H_kv, page_tokens, 2 D]`. places: int32 `[n, 3]`, see `Unfilled`.

    Runs on the current stream; a GPU reads the host's memory itself. Bytes: 4 D per token and KV head, in 16-bit types.
    """
    _, heads, tokens, numbers = rows.shape
    if rows.device.type == "cuda":
        from kvrecall.step.kernels import refill_kernel

        launch(refill_kernel, (len(places) * heads,))(
            rows, *host.pool, places, heads, *rows.stride()[:3], BLOCK=host.block_size, NUMBERS=numbers, PAGE=tokens,
            BN=next_power_of_2(numbers), num_warps=4,
        )  # fmt: skip
        return
    for page, block, first in places.tolist():
        rows[page] = host.rows[block, :, first : first + tokens].flatten(-2)

"""Windows are read back from the rows of blocks that somebody else has filled."""

from __future__ import annotations

import pytest
import torch

from kvrecall.step.refill import refill, unfilled
from kvrecall.step.stream import RowBlocks
from tests.step.test_paged import HEADS, SHAPE, SIZE

PAGE, BLOCKS, PAGES = 16, [5, 2, 7], [0] * 3 + [9, 0, 4, 1, 3, 8, 2, 6, 7]


@pytest.mark.parametrize(("start", "stop"), [(0, 1), (50, 144), (63, 64), (64, 65), (100, 192)])
def test_pages_hold_the_rows_of_their_blocks(start: int, stop: int) -> None:
    host = RowBlocks(8, SHAPE, SIZE)
    host.rows.copy_(torch.randn(host.rows.shape))
    rows = torch.full((12, HEADS, PAGE, 2 * SHAPE.head_dim), float("nan"))
    places = unfilled(PAGES, BLOCKS, PAGE, SIZE, start, stop)
    refill(rows, torch.tensor(places, dtype=torch.int32).view(-1, 3), host)
    whole = host.rows[BLOCKS].transpose(0, 1).flatten(1, 2).flatten(-2)  # [H_kv, n, 2 D]
    written = {PAGES[at // PAGE] for at in range(start, stop)} - {0}
    for page in range(12):
        if page in written:
            at = PAGES.index(page) * PAGE
            assert torch.equal(rows[page], whole[:, at : at + PAGE])
        else:
            assert rows[page].isnan().all()


def test_only_pages_that_are_told_are_filled() -> None:
    assert unfilled(PAGES, BLOCKS, PAGE, SIZE, 50, 144, [4, 5, 8]) == [(4, 2, 16), (8, 7, 0)]
    assert unfilled(PAGES, BLOCKS, PAGE, SIZE, 50, 144, []) == []

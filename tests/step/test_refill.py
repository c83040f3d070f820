"""Windows are filled from the rows of blocks that somebody else has filled."""

from __future__ import annotations

import torch

from kvrecall.step.refill import refill
from kvrecall.step.stream import RowBlocks
from tests.step.test_paged import SHAPE, SIZE


def test_pages_hold_the_rows_of_their_blocks() -> None:
    host = RowBlocks(8, SHAPE, SIZE, pages=5)
    host.rows.copy_(torch.randn(host.rows.shape))
    refill(host.device_rows, torch.tensor([[4, 2], [1, 7]], dtype=torch.int32), host)
    assert torch.equal(host.device_rows[[4, 1]], host.rows[[2, 7]]) and not host.device_rows[[0, 2, 3]].any()

"""The kernel that restores pages of the window does what the CPU does."""

from __future__ import annotations

import pytest
import torch

from kvrecall.core.launch import next_power_of_2
from kvrecall.index.base import LayerShape
from kvrecall.step.kernels import refill_kernel
from kvrecall.step.stream import RowBlocks


@pytest.mark.parametrize(("page", "dim", "padding", "near"), [(16, 64, 0, 0), (8, 96, 40, 2), (8, 64, 0, 5)])
def test_pages_hold_the_rows_of_their_blocks(page: int, dim: int, padding: int, near: int) -> None:
    heads, block, draw = 3, 64, torch.Generator().manual_seed(1)
    host = RowBlocks(5, LayerShape(1, heads, heads, dim, torch.float32, torch.device("cpu")), block, near=near)
    for each in range(5):
        host.run(each, 1).copy_(torch.randn(1, heads, block, 2, dim, generator=draw))
    held = torch.full((7, heads * page * 2 * dim + padding), float("nan"))
    rows = held[:, : heads * page * 2 * dim].unflatten(1, (heads, page, 2 * dim))
    places = [(6, 4, 48), (1, 0, 0), (2, 4, 16)]
    refill_kernel[(len(places) * heads,)](
        rows, *host.pool, torch.tensor(places, dtype=torch.int32), heads, *rows.stride()[:3], BLOCK=block, NUMBERS=2 * dim,
        PAGE=page, BN=next_power_of_2(2 * dim),
    )  # fmt: skip
    for to, source, first in places:
        assert torch.equal(rows[to], host.run(source, 1)[0, :, first : first + page].flatten(-2))
    assert held.isnan().sum() == held.numel() - len(places) * heads * page * 2 * dim

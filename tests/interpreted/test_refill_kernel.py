"""The kernel that fills pages of windows does what the CPU does."""

from __future__ import annotations

import pytest
import torch

from kvrecall.index.base import LayerShape
from kvrecall.step.kernels import refill_kernel
from kvrecall.step.stream import RowBlocks


@pytest.mark.parametrize(("block_size", "dim", "on_device"), [(64, 64, 0), (48, 96, 2), (16, 64, 5)])
def test_pages_hold_the_rows_of_their_blocks(block_size: int, dim: int, on_device: int) -> None:
    heads, draw = 3, torch.Generator().manual_seed(1)
    shape = LayerShape(1, heads, heads, dim, torch.float32, torch.device("cpu"))
    host = RowBlocks(5, shape, block_size, on_device=on_device, pages=8)
    for each in range(5):
        host.run(each, 1).copy_(torch.randn(1, heads, block_size, 2, dim, generator=draw))
    host.device_rows[on_device:].fill_(float("nan"))
    places, rows = [(6, 4), (5, 0), (7, 4)], host.device_rows
    numbers = rows[0].numel()
    refill_kernel[(-(-numbers // 1024), len(places))](
        rows, *host.pool, torch.tensor(places, dtype=torch.int32), numbers, N=1024
    )
    for to, source in places:
        assert torch.equal(rows[to], host.run(source, 1)[0])
    assert rows[on_device:5].isnan().all() and not rows[:on_device].isnan().any()

"""Keys come out of rows of the host without their values, whatever part of a zone they are."""

from __future__ import annotations

import pytest
import torch

from kvrecall.cache import host_keys
from kvrecall.cache.host_keys import copy_keys
from tests.blocks import host_table
from tests.strategies import gaussian


@pytest.mark.parametrize("programs", [1, 6, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 192, 256])
def test_keys_of_a_part_of_a_zone(dim: int, dtype: torch.dtype, programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_keys, "_PROGRAMS", programs)
    rows, near = gaussian(dim, 3, 200, 2, dim).to(dtype), torch.full((3, 150, dim), float("nan"), dtype=dtype)
    table = host_table([rows], 32)
    copy_keys(table, 30, near[:, 9:140])
    assert torch.equal(near[:, 9:140], rows[:, 30:161, 0])
    assert near[:, :9].isnan().all() and near[:, 140:].isnan().all()
    copy_keys(table, 30, near[:, :0])

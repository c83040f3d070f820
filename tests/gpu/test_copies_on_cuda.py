"""Rows between page-locked host memory and a GPU: one call of the driver for all heads of a run, and every byte arrives."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from kvrecall.cache.copies import copy_heads, prefetch_pieces, rows_to_device
from kvrecall.core import cuda
from kvrecall.core.fp8 import Fp8Rows, as_stored
from kvrecall.core.launch import cdiv
from tests.blocks import small_blocks, store, zone_of
from tests.gpu.test_uncaptured_on_cuda import CUDA
from tests.strategies import DTYPES, gaussian

pytestmark = pytest.mark.gpu
BLOCK = 64


class Calls:
    """Counts the copies that the driver starts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, self._own = 0, cuda._function()
        monkeypatch.setattr(cuda, "_function", lambda: self._counted)

    def _counted(self, *given: Any) -> int:
        self.count += 1
        return self._own(*given)

    def taken(self) -> int:
        """Copies since the last call."""
        count, self.count = self.count, 0
        return count


def runs(start: int, stop: int) -> int:
    """Blocks that hold the tokens start .. stop - 1."""
    return cdiv(stop, BLOCK) - start // BLOCK


@pytest.mark.parametrize("aside", [False, True], ids=["current", "side-stream"])
@pytest.mark.parametrize("small", [False, True], ids=["plain", "fp8"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "dim"), [(2, 64), (3, 80), (8, 128)])
def test_rows_go_to_the_host_and_back(
    heads: int, dim: int, dtype: str, small: bool, aside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory is page-locked in parts of few blocks, so the driver would refuse a copy that went beyond the block at an end."""
    small_blocks(monkeypatch, BLOCK)
    calls, parts = Calls(monkeypatch), 2 if small else 1
    rows = gaussian(1, heads, 500, 2, dim).to(DTYPES[dtype])
    back, zone = as_stored(rows) if small else rows, zone_of(heads, dim, rows.dtype, CUDA, BLOCK, small=small)
    with torch.cuda.stream(torch.cuda.Stream() if aside else torch.cuda.current_stream()):
        for start in range(0, 500, 37):
            stop = min(start + 37, 500)
            zone.append(rows[:, start:stop].cuda())
            assert calls.taken() == parts * runs(start, stop)
        assert torch.equal(torch.cat(list(zone.blocks()), 1), back)
        near = [rows_to_device(block, CUDA) for block in zone.stored(5, 491)]
        assert torch.equal(torch.cat(near, 1).cpu(), back[:, 5:491]) and calls.taken() == parts * runs(5, 491)
        with prefetch_pieces(zone, 3, 500, 90, CUDA, torch.clone) as pieces:
            assert torch.equal(torch.cat(list(pieces), 1).cpu(), back[:, 3:])
        assert calls.taken() == parts * sum(runs(start, min(start + 90, 500)) for start in range(3, 500, 90))


@pytest.mark.parametrize("small", [False, True], ids=["plain", "fp8"])
def test_bytes_around_the_rows_stay_as_they_are(small: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    zone, rows = zone_of(3, 64, torch.bfloat16, CUDA, BLOCK, small=small), gaussian(1, 3, 64, 2, 64).bfloat16()
    zone.append(rows.cuda())
    (block,) = zone.stored()
    calls = Calls(monkeypatch)
    for each in block[:2] if isinstance(block, Fp8Rows) else (block,):
        there = torch.full_like(each.view(torch.uint8), 7, device=CUDA).view(each.dtype)
        assert cuda.copy_2d(each[:, 9:41], there[:, 20:52])
        got, own = there.view(torch.uint8).cpu(), each.view(torch.uint8)
        assert torch.equal(got[:, 20:52], own[:, 9:41]) and (got[:, :20] == 7).all() and (got[:, 52:] == 7).all()
        kept = own.clone()
        assert cuda.copy_2d(there[:, 20:40], each[:, 30:50])
        torch.cuda.synchronize()
        kept[:, 30:50] = got[:, 20:40]
        assert torch.equal(own, kept)
    assert calls.taken() == (4 if small else 2)


def test_a_thread_that_has_called_nothing_copies() -> None:
    zone, rows = zone_of(3, 64, torch.bfloat16, CUDA, BLOCK), gaussian(1, 3, 64, 2, 64).bfloat16()
    zone.append(rows.cuda())
    (block,) = zone.blocks(on_device=True)
    near, made = torch.zeros_like(block, device=CUDA), list[bool]()
    torch.cuda.synchronize()
    thread = threading.Thread(target=lambda: made.append(cuda.copy_2d(block, near)))
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert made == [True] and torch.equal(near.cpu(), rows)


def test_the_host_does_not_wait() -> None:
    zone, rows = zone_of(8, 128, torch.bfloat16, CUDA, 1024), gaussian(1, 8, 1024, 2, 128).bfloat16()
    zone.append(rows.cuda())
    (block,) = zone.blocks(on_device=True)
    near, big = torch.zeros_like(block, device=CUDA), torch.randn(8192, 8192, device=CUDA)
    assert cuda.copy_2d(block, near)
    torch.cuda.synchronize()
    near.zero_()
    for _ in range(20):
        torch.mm(big, big)
    assert cuda.copy_2d(block, near)
    assert not torch.cuda.current_stream().query()
    assert torch.equal(near.cpu(), rows)


@pytest.mark.parametrize("small", [False, True], ids=["plain", "fp8"])
def test_rows_that_lie_across_pieces_of_device_memory(small: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 96 KiB in memory that is mapped in pieces of 2 MiB: some have heads in two of them."""
    small_blocks(monkeypatch, BLOCK)
    made = store(1, 3, 128, torch.bfloat16, "cuda", BLOCK, on_device=True, small=small)
    rows = gaussian(1, 3, 5000, 2, 128).bfloat16()
    for piece in rows.split(500, 1):
        made.host[0].append(piece.cuda())
    calls = Calls(monkeypatch)
    assert made.on_device
    made.place(False)
    assert not made.on_device
    assert calls.taken() == (2 if small else 1) * cdiv(5000, BLOCK)
    assert torch.equal(torch.cat(list(made.host[0].blocks()), 1), as_stored(rows) if small else rows)


def test_pageable_memory_is_copied_head_by_head(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, rows = Calls(monkeypatch), gaussian(1, 3, 64, 2, 64)
    near, back = torch.zeros_like(rows, device=CUDA), torch.zeros_like(rows)
    copy_heads(rows, near)
    copy_heads(near, back)
    torch.cuda.synchronize()
    assert torch.equal(back, rows) and not calls.taken()


@pytest.mark.gpu2
def test_the_gpu_of_the_rows_need_not_be_the_current_one() -> None:
    other = torch.device("cuda", 1)
    zone, rows = zone_of(3, 64, torch.bfloat16, other, BLOCK), gaussian(1, 3, 200, 2, 64).bfloat16()
    with torch.cuda.device(0):
        zone.append(rows.to(other))
        near = [rows_to_device(block, other) for block in zone.stored()]
        assert torch.cuda.current_device() == 0
    assert torch.equal(torch.cat(near, 1).cpu(), rows)

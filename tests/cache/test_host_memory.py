"""Pinning without a GPU: a stand-in for CUDA's runtime sees what is registered and released, and what a refusal does."""

from __future__ import annotations

import ctypes
import gc
import mmap
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from kvrecall.cache import host_memory
from kvrecall.cache.host_memory import allocate, staging
from kvrecall.cache.host_pool import HostPool
from kvrecall.core.errors import HostMemoryError


class Runtime:
    """Registers memory, and reads a byte of it when it is released, as a GPU might until then."""

    def __init__(self, status: int = 0) -> None:
        self.status = status
        self.live: dict[int, int] = {}
        self.released: list[int] = []

    def cudaHostRegister(self, address: int, count: int, flags: int) -> int:
        assert flags == 3 and address not in self.live
        if self.status == 0:
            self.live[address] = count
        return self.status

    def cudaHostUnregister(self, address: int) -> int:
        ctypes.string_at(address, self.live.pop(address))  # the pages must still be there
        self.released.append(address)
        return 0


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    made = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    monkeypatch.setattr(host_memory, "_warned", False)
    return made


def test_memory_is_registered_and_released_exactly_once(runtime: Runtime) -> None:
    tensor = allocate((3, 1000, 2, 64), torch.bfloat16, pin=True)
    assert list(runtime.live.values()) == [3 * 1000 * 2 * 64 * 2]
    view = tensor[1, 5:7]
    del tensor
    gc.collect()
    assert len(runtime.live) == 1  # a view keeps it
    view.fill_(1.0)
    del view
    gc.collect()
    assert not runtime.live and len(runtime.released) == 1


def test_a_pool_and_its_forks_release_every_segment_with_the_last_of_them(runtime: Runtime) -> None:
    pool = HostPool(2, 8, torch.float32, pin=True, segment_tokens=4)
    for _ in range(5):
        pool.append(torch.randn(2, 3, 2, 8))
    fork = pool.fork()
    fork.append(torch.randn(2, 6, 2, 8))
    own = {held.data_ptr() for _, held in pool.segments()}
    assert set(runtime.live) > own
    del pool
    gc.collect()
    assert set(runtime.live) > own
    fork.truncate(2)
    gc.collect()
    assert len(runtime.live) == 1
    del fork
    gc.collect()
    assert not runtime.live and len(runtime.released) == len(set(runtime.released)) >= 4


def test_growth_moves_no_row(runtime: Runtime) -> None:
    pool = HostPool(2, 8, torch.float32, pin=True, segment_tokens=4)
    pool.append(torch.randn(2, 3, 2, 8))
    first = pool.segments()[0][1].data_ptr()
    pool.reserve(100)
    pool.append(torch.randn(2, 50, 2, 8))
    assert pool.segments()[0][1].data_ptr() == first
    assert [held.shape[1] for _, held in pool.segments()] == [4, 96]  # of exactly the announced size, and in one piece


@pytest.mark.filterwarnings("always")
def test_a_refusal_warns_once_and_gives_pageable_memory(runtime: Runtime) -> None:
    runtime.status = 2
    with pytest.warns(RuntimeWarning, match=r"expected to pin 4,000 bytes, got a refusal \(CUDA error 2\).*pageable.*ulimit"):
        tensor = allocate((1000,), torch.float32, pin=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pool = HostPool(2, 8, torch.float32, pin=True)
        rows = torch.randn(2, 30, 2, 8)
        pool.append(rows)
    assert torch.equal(pool.gather(torch.arange(30).expand(2, -1)), rows)
    del tensor, pool
    gc.collect()
    assert not runtime.released  # what was never registered is not released


def resident_pages(tensor: torch.Tensor) -> int:
    """Pages of a tensor that the system has given memory."""
    count = tensor.nbytes // mmap.PAGESIZE
    found = (ctypes.c_ubyte * count)()
    assert not ctypes.CDLL(None).mincore(ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.nbytes), found)
    return sum(page & 1 for page in found)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks Linux for resident pages")
@pytest.mark.filterwarnings("ignore")
def test_pages_are_given_before_they_are_locked_and_not_where_that_is_refused(runtime: Runtime) -> None:
    size = (50 * mmap.PAGESIZE,)
    assert resident_pages(allocate(size, torch.uint8, pin=True)) == 50
    assert resident_pages(allocate(size, torch.uint8, pin=False)) == 0
    runtime.status = 2
    for _ in range(2):  # given back, then not asked for
        assert resident_pages(allocate(size, torch.uint8, pin=True)) == 0


def mapping_flags(tensor: torch.Tensor) -> set[str]:
    """What Linux says of the mapping that a tensor lies in, two letters each."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            start, end = (int(edge, 16) for edge in words[0].split("-"))
            inside = start <= tensor.data_ptr() < end
        elif inside and words[0] == "VmFlags:":
            return set(words[1:])
    raise AssertionError("no mapping holds the tensor")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks Linux about a mapping")
def test_pages_may_be_huge_and_no_child_gets_those_that_are_locked(runtime: Runtime) -> None:
    """hg: huge pages are asked for, which sh (shared) mappings would not be given; dc: not copied when the process forks."""
    size = (4 << 20,)
    locked, plain = allocate(size, torch.uint8, pin=True), allocate(size, torch.uint8, pin=False)
    assert {"hg", "dc"} <= mapping_flags(locked)
    assert not {"hg", "dc"} & mapping_flags(plain)
    assert "sh" not in mapping_flags(locked) | mapping_flags(plain)


@pytest.mark.filterwarnings("always")
def test_staging_falls_back_to_pageable_memory(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty

    def refuse(*args: Any, pin_memory: bool = False, **more: Any) -> torch.Tensor:
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory\nmore about it")
        return empty(*args, **more)

    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.warns(RuntimeWarning, match=r"\(CUDA error: out of memory\)"):
        assert staging((3, 2), torch.float16).shape == (3, 2)


def test_at_exit_nothing_is_released() -> None:
    program = """
import torch
from kvrecall.cache.host_memory import allocate
class Runtime:
    cudaHostRegister = staticmethod(lambda *_: 0)
    cudaHostUnregister = staticmethod(lambda *_: print("released"))
torch.cuda.cudart = lambda: Runtime
kept = allocate((1000,), torch.float32, pin=True)
gone = allocate((1000,), torch.float32, pin=True)
del gone
print("ends")
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode == 0 and not run.stderr and run.stdout.split() == ["released", "ends"]


def test_a_host_without_memory_says_how_much_was_needed_and_stores_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = HostPool(2, 8, torch.float32, segment_tokens=4)
    rows = torch.randn(2, 10, 2, 8)
    pool.append(rows[:, :3])

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(12, "Cannot allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(mmap, "mmap", refuse)
        with pytest.raises(HostMemoryError, match=r"6 tokens need 768 bytes .* are available.*nothing was stored") as caught:
            pool.append(rows[:, 3:])  # one row would still have had room
    assert caught.value.need_bytes == 2 * 6 * 2 * 8 * 4 and isinstance(caught.value.__cause__, OSError)
    assert pool.length == 3
    pool.append(rows[:, 3:])
    assert torch.equal(torch.cat(list(pool.blocks()), 1), rows)


def test_room_that_was_made_is_not_read() -> None:
    pool = HostPool(2, 8, torch.float32, segment_tokens=4)
    rows = torch.randn(2, 12, 2, 8)
    pool.append(rows[:, :3])
    pool.make_room(7)
    assert [block.shape[1] for block in pool.blocks()] == [3]
    assert torch.equal(pool.gather(torch.arange(3).expand(2, -1)), rows[:, :3])
    pool.append(rows[:, 3:10])
    assert torch.equal(torch.cat(list(pool.blocks()), 1), rows[:, :10])
    pool.make_room(50)
    assert torch.equal(pool.consolidate(60)[:, :10], rows[:, :10])
    pool.append(rows[:, 10:])
    assert torch.equal(torch.cat(list(pool.blocks()), 1), rows)

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
from kvrecall.cache.host_memory import Region, available_host_bytes, touch
from kvrecall.core import cuda
from kvrecall.core.cuda import staging
from kvrecall.core.errors import HostMemoryError
from tests.blocks import fork, small_blocks, zone_of


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
    monkeypatch.setattr(cuda, "_warned", False)
    return made


GPU = torch.device("cuda")


def region(tokens: int, given: int | None = None, device: torch.device | None = GPU) -> Region:
    """Of rows of 512 bytes, the first of which are usable."""
    made = Region((tokens, 2, 64), torch.float32, device)
    made.commit(tokens if given is None else given)
    return made


def test_memory_is_registered_as_it_is_given_and_released_exactly_once(runtime: Runtime) -> None:
    made = region(1000, 100)
    assert list(runtime.live.values()) == [13 * mmap.PAGESIZE]  # 51,200 bytes in whole pages
    made.commit(90)
    assert len(runtime.live) == 1
    made.commit(1000)
    assert sum(runtime.live.values()) == 1000 * 512 and made.pinned
    addresses = sorted(runtime.live)
    assert addresses[0] == made.tensor.data_ptr() and addresses[1] == addresses[0] + 13 * mmap.PAGESIZE
    view = made.tensor[500:700]
    del made
    gc.collect()
    assert len(runtime.live) == 2  # a view keeps it
    view.fill_(1.0)
    del view
    gc.collect()
    assert not runtime.live and len(runtime.released) == 2


def test_memory_that_is_touched_ahead_is_given_back_and_nothing_else(runtime: Runtime) -> None:
    made, plain = region(1000, 100), region(1000, 100, None)
    made.tensor[:100], plain.tensor[:100] = 1.0, 2.0
    touch([made, plain], 500)
    assert (made._touched, plain._touched) == (63 * mmap.PAGESIZE, 0), "without a GPU pages are given when they are used"
    touch([made], 200)
    assert made.tensor[:100].eq(1).all() and plain.tensor[:100].eq(2).all()
    made.give_back()
    assert made._touched == made._given
    made.commit(500)
    assert made.tensor[:100].eq(1).all() and made.tensor[104:500].eq(0).all()
    made.tensor[100:500] = 3.0
    made.give_back(), touch([made], 400)
    assert made.tensor[100:500].eq(3).all()


def test_a_refusal_gives_back_what_was_touched(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    made = region(1000, 100)
    touch([made], 900)
    monkeypatch.setattr(runtime, "cudaHostRegister", lambda *_: 2)
    with pytest.warns(RuntimeWarning, match="expected to pin"):
        made.commit(200)
    assert not made.pinned and made._touched < 200 * 512
    del made
    gc.collect()


def test_a_zone_and_its_forks_release_memory_with_the_last_of_them(runtime: Runtime) -> None:
    zone = zone_of(2, 8, device=GPU)
    for _ in range(5):
        zone.append(torch.randn(2, 30, 2, 8))
    other = fork(zone)
    other.append(torch.randn(2, 60, 2, 8))
    del zone
    gc.collect()
    assert runtime.live
    other.truncate(2)
    other.release_unused()
    assert runtime.live and other.block_table.pool.used == 1
    del other
    gc.collect()
    assert not runtime.live and len(runtime.released) == len(set(runtime.released)) >= 1


def test_growth_moves_no_row(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    small_blocks(monkeypatch)
    zone = zone_of(2, 8, device=GPU)
    zone.append(torch.randn(2, 3, 2, 8))
    first = next(zone.blocks()).data_ptr()
    zone.reserve(10_000)
    zone.append(torch.randn(2, 50, 2, 8))
    assert next(zone.blocks()).data_ptr() == first
    assert len(runtime.live) == 2  # the first block, then all that was announced


@pytest.mark.filterwarnings("always")
def test_a_refusal_warns_once_and_gives_pageable_memory(runtime: Runtime) -> None:
    runtime.status = 2
    with pytest.warns(RuntimeWarning, match=r"expected to pin 4,096 bytes, got a refusal \(CUDA error 2\).*pageable.*ulimit"):
        tensor = region(8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pool = zone_of(2, 8, device=GPU)
        rows = torch.randn(2, 30, 2, 8)
        pool.append(rows)
    assert torch.equal(pool.gather(torch.arange(30).expand(2, -1)), rows)
    assert not tensor.pinned and pool.table(GPU) is None
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
    tokens = 50 * mmap.PAGESIZE // 512
    assert resident_pages(region(2 * tokens, tokens).tensor) == 50
    assert resident_pages(region(tokens, device=None).tensor) == 0
    runtime.status = 2
    for _ in range(2):  # given back, then not asked for
        assert resident_pages(region(tokens).tensor) == 0


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
    locked, plain = region(8192).tensor, region(8192, device=None).tensor
    assert {"hg", "dc"} <= mapping_flags(locked)
    assert not {"hg", "dc"} & mapping_flags(plain)
    assert "sh" not in mapping_flags(locked) | mapping_flags(plain)
    assert "nr" in mapping_flags(plain)  # address space alone is no promise of memory


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
from kvrecall.cache.host_memory import Region
class Runtime:
    cudaHostRegister = staticmethod(lambda *_: 0)
    cudaHostUnregister = staticmethod(lambda *_: print("released"))
torch.cuda.cudart = lambda: Runtime
kept, gone = (Region((1000,), torch.float32, torch.device("cuda")) for _ in range(2))
kept.commit(1000), gone.commit(1000)
del gone
print("ends")
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode == 0 and not run.stderr and run.stdout.split() == ["released", "ends"]


def test_a_host_without_memory_says_how_much_was_needed_and_stores_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    small_blocks(monkeypatch)
    zone = zone_of(2, 8)
    rows = torch.randn(2, 100, 2, 8)
    zone.append(rows[:, :30])
    with monkeypatch.context() as patch:
        patch.setattr("kvrecall.cache.block_rows.available_host_bytes", lambda: 5000)
        with pytest.raises(
            HostMemoryError, match=r"80 tokens need .* 5,000 bytes .* are available.*nothing was stored"
        ) as caught:
            zone.append(rows[:, 30:])  # two rows would still have had room
    assert caught.value.available_bytes == 5000 < caught.value.need_bytes
    assert zone.length == 30
    zone.append(rows[:, 30:])
    assert torch.equal(torch.cat(list(zone.blocks()), 1), rows)


def test_a_process_that_may_not_have_much_address_space_gets_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """`ulimit -v`, or a system that promises no more than it has."""
    made, real = [], mmap.mmap

    def limited(number: int, count: int, **more: Any) -> Any:
        made.append(count)
        if count > 1 << 20:
            raise OSError(12, "Cannot allocate memory")
        return real(number, count, **more)

    monkeypatch.setattr(mmap, "mmap", limited)
    zone = zone_of(2, 8)
    assert made[-1] <= 1 << 20 < made[0]
    zone.append(torch.randn(2, 1000, 2, 8))
    with pytest.raises(HostMemoryError, match="nothing was stored"):
        zone.append(torch.randn(2, 10_000, 2, 8))
    assert zone.length == 1000


def test_room_that_was_made_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    small_blocks(monkeypatch)
    zone = zone_of(2, 8)
    rows = torch.randn(2, 62, 2, 8)
    zone.append(rows[:, :3])
    zone.make_room(37)
    assert [block.shape[1] for block in zone.blocks()] == [3]
    assert torch.equal(zone.gather(torch.arange(3).expand(2, -1)), rows[:, :3])
    zone.append(rows[:, 3:])
    assert torch.equal(torch.cat(list(zone.blocks()), 1), rows)


def test_available_memory_is_a_plausible_number(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    assert 2**20 < available_host_bytes() < 2**50
    real = host_memory.Path
    limits = {"memory.max": "3000", "memory.current": "1000"}

    class Limited(type(real())):
        def read_text(self, *args: Any, **kwargs: Any) -> str:
            return limits[self.name] if self.name in limits else super().read_text(*args, **kwargs)

    monkeypatch.setattr(host_memory, "Path", Limited)
    assert available_host_bytes() == 2000  # the control group's limit, where it is the lower one
    limits["memory.max"] = "max"
    assert available_host_bytes() > 2**20

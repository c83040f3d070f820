"""Copies to the host that arrive as late as they may: whatever is read is what a store that copies at once holds."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from kvrecall.cache.block_rows import BlockRows
from kvrecall.cache.copies import rows_to_device
from kvrecall.cache.layer import LayerStore
from kvrecall.cache.zones import ZoneSizes
from tests.blocks import fork, poison, small_blocks, zone_of

HEADS, DIM = 2, 3


class SideStream:
    """Copies in order, and none before somebody waits for it or for a later one."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Tensor, Tensor]] = []
        self.done = self.most = 0

    def rows_to_host(self, rows: Tensor, target: Tensor) -> Late:
        self.waiting.append((rows, target))
        self.most = max(self.most, len(self.waiting))
        return Late(self, self.done + len(self.waiting))

    def send_at_once(self, rows: Tensor, target: Tensor) -> Late:
        target.copy_(rows)
        return Late(self, self.done)

    def run(self, until: int) -> None:
        while self.done < until:
            rows, target = self.waiting.pop(0)
            target.copy_(rows)
            self.done += 1


class Late:
    def __init__(self, stream: SideStream, number: int) -> None:
        self._stream, self._number = stream, number

    def wait(self, stream: None) -> None:
        self._stream.run(self._number)

    def synchronize(self) -> None:
        self._stream.run(self._number)

    def query(self) -> bool:
        return self._stream.done >= self._number


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> SideStream:
    """As if all rows were on a GPU, and its copies slow; what was not written is NaN."""
    stream = SideStream()
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True), raising=False)
    monkeypatch.setattr("kvrecall.cache.block_rows.rows_to_host", stream.rows_to_host)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: None)
    small_blocks(monkeypatch)
    poison(monkeypatch)
    return stream


def store() -> LayerStore:
    return LayerStore(2, HEADS, DIM, torch.float32, torch.device("cpu"), ZoneSizes(2, 4, 3))


def read(of: LayerStore, b: int, way: int) -> Tensor:
    """Every row, by one of the ways in which rows of the host are read."""
    pool, zones = of.host[b], of.zones(b)
    resident = of.resident.view(b)
    if way == 0:
        return torch.cat(list(of.blocks(b)), 1)
    if way == 1:
        return torch.cat(list(of.blocks(b, on_device=True)), 1)
    if way == 2:
        middle = pool.gather(torch.arange(pool.length).expand(HEADS, -1))
    else:
        middle, table = torch.empty(HEADS, pool.length, 2, DIM), pool.table(torch.device("cpu"))
        for token in range(pool.length):
            assert table is not None
            middle[:, token] = table.rows[table.blocks[0, token // 16], :, token % 16]
    return torch.cat([resident[:, : zones.sink], middle, resident[:, zones.sink :]], 1)


def course(seed: int, steps: int = 120) -> list[Tensor]:
    """Random appends, updates, crops, copies and reads; returns everything that was read."""
    draw, own, made = random.Random(seed), store(), []
    numbers = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        what, b = draw.random(), draw.randrange(2)
        if what < 0.6:
            own.append_step(*(torch.randn(2, HEADS, 1, DIM, generator=numbers) for _ in range(2)), None)
            own.evict(0), own.evict(1)
        elif what < 0.7:
            chunk = torch.randn(HEADS, draw.randrange(1, 40), DIM, generator=numbers)
            own.append_chunk(b, chunk, -chunk)
        elif what < 0.8:
            own.crop(b, max(0, own.zones(b).total - draw.randrange(25)))
        elif what < 0.9:
            own = own.select(draw.choice([[0, 1], [1, 0], [1, 1], [0, 0]]))
        else:
            made.append(read(own, b, draw.randrange(4)).clone())
    return [*made, read(own, 0, 0).clone(), read(own, 1, 2).clone()]


@pytest.mark.parametrize("seed", range(12))
def test_reads_wait_for_what_is_on_its_way(seed: int, late: SideStream) -> None:
    made = course(seed)
    assert late.most > 1  # some copies really waited
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvrecall.cache.block_rows.rows_to_host", late.send_at_once)
        expected = course(seed)
    assert all(torch.equal(x, y) for x, y in zip(made, expected, strict=True))
    assert all(torch.isfinite(x).all() for x in made)


def test_without_waiting_it_would_show(late: SideStream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockRows, "wait", lambda *_, **__: None)
    assert any(not torch.isfinite(x).all() for x in course(0))


def test_a_block_that_is_copied_has_all_its_rows(late: SideStream) -> None:
    zone, rows = zone_of(HEADS, DIM), torch.randn(HEADS, 9, 2, DIM)
    zone.append(rows)
    other = fork(zone)
    assert late.waiting
    other.append(rows)
    for each in (zone, other):
        assert torch.equal(each.gather(torch.arange(9).expand(HEADS, -1)), rows)


def test_reaching_waits_for_what_is_on_its_way(late: SideStream) -> None:
    own, rows = store(), torch.randn(HEADS, 90, DIM)
    own.append_chunk(0, rows, -rows)
    assert late.waiting
    own.ensure_blocks(200)
    assert not late.waiting


def test_on_the_cpu_nothing_is_brought_anywhere() -> None:
    block = torch.randn(HEADS, 5, 2, DIM)
    assert rows_to_device(block, torch.device("cpu")) is block

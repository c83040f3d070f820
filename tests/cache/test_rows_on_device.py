"""Rows that lie on the device of their layer: stores behave as with rows on the host, and move there when they must."""

from __future__ import annotations

import gc
import random
import threading
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from kvrecall.cache import block_rows
from kvrecall.cache.block_rows import BlockRows
from kvrecall.cache.blocks import BlockPool, BlockTable
from kvrecall.cache.host_memory import Region
from kvrecall.cache.layer import LayerStore
from kvrecall.cache.zone_rows import ZoneRows
from kvrecall.core.errors import HostMemoryError
from tests.blocks import CPU, SIZES, Device, fork, poison, small_blocks, store, zone_of
from tests.strategies import gaussian

HEADS, DIM = 2, 8


def rows(seed: int, count: int) -> Tensor:
    return gaussian(seed, HEADS, count, 2, DIM)


def near(sequences: int = 2) -> LayerStore:
    return store(sequences, HEADS, DIM, torch.float32, block_size=16, on_device=True)


def fill(made: LayerStore, sequence: int, seed: int, count: int) -> Tensor:
    new = rows(seed, count)
    made.append_chunk(sequence, new[:, :, 0], new[:, :, 1])
    return new


def contents(made: LayerStore, sequence: int) -> Tensor:
    return torch.cat(list(made.blocks(sequence)), 1)


def test_every_way_of_reading_gives_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch)
    zone, stored = zone_of(HEADS, DIM, on_device=True), rows(1, 40)
    for part in stored.split(7, 1):
        zone.append(part)
    assert zone.on_device
    assert torch.equal(torch.cat(list(zone.blocks()), 1), stored)
    assert torch.equal(torch.cat(list(zone.blocks(5, 33)), 1), stored[:, 5:33])
    ids = torch.tensor([[3, 39, 16], [0, 15, 20]])
    assert torch.equal(zone.gather(ids), torch.stack([stored[h, ids[h]] for h in range(HEADS)]))
    table = zone.table(CPU)
    assert table is not None and torch.equal(table.rows[table.blocks[0, 1], :, 2], stored[:, 18])


@pytest.mark.parametrize("refusing", [None, *range(1, 12)], ids=str)
def test_any_course_equals_that_of_rows_on_the_host(refusing: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks, steps, crops, marks that are gone back to, selections and forks; the device refuses at every moment in turn."""
    small_blocks(monkeypatch)
    Device(monkeypatch, refusing)
    draw = random.Random(7)
    pairs = [(near(), store(2, HEADS, DIM, torch.float32, block_size=16))]
    for number in range(60):
        made, plain = pairs[draw.randrange(len(pairs))]
        b, what = draw.randrange(made.sequences), draw.choice(["chunk", "chunk", "step", "crop", "undo", "select", "drop"])
        tokens, keep = draw.randint(1, 50), draw.randrange(1 + made.zones(b).total)
        order = [draw.randrange(made.sequences) for _ in range(2)]
        for each in (made, plain):
            if what == "chunk":
                fill(each, b, number, tokens)
            elif what == "step":
                new = torch.stack([rows(number, 1), rows(number + 1, 1)][: each.sequences])
                each.append_step(new[:, :, :, 0], new[:, :, :, 1], None)
                each.evict(b)
            elif what == "crop":
                each.crop(b, keep)
            elif what == "undo":
                each.mark()
                fill(each, b, number, tokens)
                each.crop(b, min(keep, 9))
                each.restore()
                each.keep()
        if what == "select" and len(pairs) < 4:
            pairs.append((made.select(order), plain.select(order)))
        if what == "drop" and len(pairs) > 1:
            pairs.remove((made, plain))
        for own, other in pairs:
            for sequence in range(own.sequences):
                assert own.zones(sequence) == other.zones(sequence)
                assert torch.equal(contents(own, sequence), contents(other, sequence))
    assert {own.on_device for own, _ in pairs} == {refusing is None}


def test_whole_zones_are_told_anew_only_when_something_has_changed() -> None:
    made = near()
    stored = [fill(made, 0, 1, 60), fill(made, 1, 2, 90)]
    table, lengths = made.whole_zones([0, 1])
    assert lengths.tolist() == [40, 70] and table.blocks.shape == (2, 5)
    for b, own in enumerate(stored):
        for token in range(int(lengths[b])):
            assert torch.equal(table.rows[table.blocks[b, token // 16], :, token % 16], own[:, token + 4])
    again = made.whole_zones([0, 1])
    assert again[0].blocks is table.blocks and again[1] is lengths
    assert made.whole_zones([1])[1].tolist() == [0, 70]
    fill(made, 0, 3, 3)
    table, lengths = made.whole_zones([0, 1])
    assert lengths.tolist() == [43, 70] and table.blocks[0, :3].tolist() == made.host[0].block_table.blocks


def test_a_refusal_moves_all_rows_of_the_layer_once_and_gives_the_device_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of forks, too; who reads the old memory may go on."""
    small_blocks(monkeypatch)
    made = near()
    stored, other = fill(made, 0, 1, 70), made.select([0])
    old = list(made.host[0].blocks())
    memory = weakref.ref(made.memory.rows)
    with monkeypatch.context() as patch:
        Device(patch, 1)
        more = fill(made, 0, 2, 40)
    assert not made.on_device and not other.on_device
    assert torch.equal(torch.cat(old, 1), stored[:, 4:54])
    del old
    gc.collect()
    assert memory() is None
    fill(made, 1, 3, 200)
    assert not made.on_device  # where they stay, though there is room again
    assert torch.equal(contents(made, 0), torch.cat([stored, more], 1)) and torch.equal(contents(other, 0), stored)


def test_a_block_that_is_copied_on_write_may_be_the_one_that_finds_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """It belongs to another layer than the one that writes; both hold their rows afterwards."""
    small_blocks(monkeypatch)
    pool = BlockPool(16)
    tables = [BlockTable(pool)]
    layers = [LayerStore(1, HEADS, DIM, torch.float32, CPU, SIZES, layer=n, tables=tables, on_device=True) for n in range(2)]
    stored = [fill(layer, 0, n, 70) for n, layer in enumerate(layers)]
    tables = [tables[0].fork()]
    forks = [layer.select([0], tables) for layer in layers]
    Device(monkeypatch, 2)
    layers[0].host[0].ensure_blocks(
        60
    )  # 50 rows are there: the last block is copied, first that of this layer, then the other's
    assert [layer.on_device for layer in layers] == [True, False]
    for number in range(2):
        for each in (layers[number], forks[number]):
            assert torch.equal(contents(each, 0), stored[number])


def test_neither_memory_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    small_blocks(monkeypatch)
    made = near()
    stored = fill(made, 0, 1, 70)
    with monkeypatch.context() as patch:
        Device(patch, 1)
        patch.setattr("kvrecall.cache.block_rows.available_host_bytes", lambda: 1000)
        with pytest.raises(HostMemoryError):
            fill(made, 0, 2, 200)
    assert made.on_device and torch.equal(contents(made, 0), stored)
    more = fill(made, 0, 2, 200)
    assert made.on_device and torch.equal(contents(made, 0), torch.cat([stored, more], 1))


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError(), OSError(12, "no memory")])
def test_a_device_that_promises_more_than_it_gives(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    small_blocks(monkeypatch)
    monkeypatch.setattr(block_rows, "_warned", True)
    made, commit = near(), Region.commit
    stored = fill(made, 0, 1, 70)
    region = made.memory._place.region

    def refused(self: Region, pieces: int) -> None:
        if self is region:
            raise error
        commit(self, pieces)

    monkeypatch.setattr(Region, "commit", refused)
    more = fill(made, 0, 2, 100)
    assert not made.on_device and torch.equal(contents(made, 0), torch.cat([stored, more], 1))


def test_a_device_without_the_first_piece_has_rows_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_rows, "_warned", True)

    def none(*_: Any) -> Any:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(block_rows, "region", none)
    made = BlockRows(HEADS, 16, DIM, torch.float32, CPU, on_device=True)
    assert not made.on_device and made.try_commit(3)


def test_one_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = [near() for _ in range(2)]
    Device(monkeypatch, 1)
    monkeypatch.setattr(block_rows, "_warned", False)
    with pytest.warns(RuntimeWarning, match="of a layer that searches nothing.*bytes free.*over the bus"):
        fill(made[0], 0, 1, 70)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fill(made[1], 0, 1, 70)


@pytest.mark.parametrize("on_device", [False, True])
def test_a_store_that_is_placed_elsewhere_leaves_its_copies_where_they_are(on_device: bool) -> None:
    first = store(2, HEADS, DIM, torch.float32, block_size=16, on_device=not on_device)
    stored = [fill(first, 0, 1, 70), fill(first, 1, 2, 33)]
    second, third = first.select([0, 1]), first.select([1])
    second.place(on_device)
    third.place(on_device)
    assert (first.on_device, second.on_device, third.on_device) == (not on_device, on_device, on_device)
    assert second.memory.rows is third.memory.rows is not first.memory.rows
    grown = [torch.cat([stored[0], fill(each, 0, 9 + i, 30)], 1) for i, each in enumerate((first, second))]
    assert torch.equal(contents(first, 0), grown[0]) and torch.equal(contents(second, 0), grown[1])
    for each, b in ((first, 1), (second, 1), (third, 0)):
        assert torch.equal(contents(each, b), stored[1])
    second.place(not on_device)
    assert second.memory.rows is first.memory.rows and torch.equal(contents(second, 0), grown[1])
    assert torch.equal(contents(first, 0), grown[0])


def test_where_the_device_has_no_room_a_store_stays_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    made = store(1, HEADS, DIM, torch.float32, block_size=16)
    stored, before = fill(made, 0, 1, 70), made.memory.rows
    Device(monkeypatch, 1)
    made.place(True)
    assert not made.on_device and made.memory.rows is before and torch.equal(contents(made, 0), stored)


def test_copies_in_threads_of_their_own_while_rows_move(monkeypatch: pytest.MonkeyPatch) -> None:
    small_blocks(monkeypatch)
    device, wrong = Device(monkeypatch), []
    first = zone_of(HEADS, DIM, on_device=True)
    first.append(rows(0, 40))

    refuses = threading.Event()

    def work(number: int, zone: ZoneRows) -> None:
        expected = rows(0, 40)
        for turn in range(60):
            if number != 2 and turn == 20:
                assert refuses.wait(60)  # so that much is still asked for
            new = rows(1000 * number + turn, 1 + (number + turn) % 9)
            zone.append(new)
            expected = torch.cat([expected, new], 1)
            if not torch.equal(torch.cat(list(zone.blocks()), 1), expected):
                wrong.append((number, turn))
            if number == 2 and turn == 20:
                device.refusing = 1
                refuses.set()

    threads = [threading.Thread(target=work, args=(number, fork(first))) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and not first.on_device and torch.equal(torch.cat(list(first.blocks()), 1), rows(0, 40))


@pytest.mark.parametrize("piece", [1, 16, 33, 48, 1000])
def test_rows_pass_in_pieces(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvrecall.cache.layer._PIECE_BYTES", piece * HEADS * 2 * DIM * 4)
    made = near(1)
    stored = fill(made, 0, 1, 100)
    with made.stream_rows(0, lambda each: each.clone()) as passed:
        got = list(passed)
    assert torch.equal(torch.cat(got[1:], 1), stored[:, 4:84])
    assert all(each.shape[1] <= max(piece, 16) for each in got[1:])
    assert len(got) == 1 + {1: 5, 16: 5, 33: 3, 48: 2, 1000: 1}[piece]

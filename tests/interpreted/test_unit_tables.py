"""Units of a sequence in a slot lie in memory of its own: as much as it needs, copied once, seen by no copy of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import kvrecall
from kvrecall.cache.blocks import BlockPool, BlockTable
from kvrecall.index.units import UnitIndex, Units
from kvrecall.layer.pipeline import decode_step
from kvrecall.layer.state import LayerState
from tests.layers import PARAMS, ZONES, start, state, tokens

pytest.importorskip("triton", reason="Triton is only there on Linux")
from kvrecall.layer.slots.layers import Layers, SlotLease
from kvrecall.layer.slots.search import SearchSlots
from tests.interpreted.slots import in_slots

METHODS = {
    "pages": kvrecall.Method(top_k=10, index="pages:page_tokens=4", **ZONES),
    "landmarks": kvrecall.Method(top_k=10, index="pages:page_tokens=3,bounds=mean", **ZONES),
    "segments": kvrecall.LouisKV(
        top_k=9, threshold=1.0, dense_layers=(), cluster_tokens=4, stretch_tokens=32, max_segment_tokens=6, **ZONES
    ),
}
LONG, SHORT, ROOM = 1_203, 59, 16


def make(layers: Layers, number: int, new: tuple[Tensor, ...]) -> Tensor:
    layers.prepare()
    out = layers.all[0].step(*new, torch.tensor([number % 2]), PARAMS)
    layers.advance()
    return out


def units_of(layer: LayerState, sequence: int = 0) -> Units:
    assert isinstance(layer.index, UnitIndex)
    return layer.index.units(sequence)


def copied(units: Units) -> tuple[Tensor, ...]:
    return units.reps.clone(), units.members.clone(), units.offsets.clone()


def assert_equal(units: Units, expected: tuple[Tensor, ...]) -> None:
    for ours, theirs in zip((units.reps, units.members, units.offsets), expected, strict=True):
        assert torch.equal(ours, theirs)


def tables_of(layers: Layers) -> int:
    """Bytes of the tensors of an index's part, the scratch of its searches included, but not what belongs to the layer."""
    layer, storages = layers.all[0], dict[int, int]()
    assert isinstance(layer, SearchSlots)

    def look(value: Any) -> None:
        if isinstance(value, Tensor):
            storages[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        elif isinstance(value, dict):
            for each in value.values():
                look(each)
        elif hasattr(value, "__dict__"):
            look(vars(value))

    look({name: value for name, value in vars(layer.part).items() if name != "spec"})
    return sum(storages.values())


@pytest.mark.parametrize("name", METHODS)
def test_a_long_sequence_takes_no_memory_of_short_ones(name: str) -> None:
    """One and four: each takes what its tokens, its window and its steps can need, and gets what it gets alone."""
    lengths = [SHORT, LONG // 2, *[SHORT] * 3]
    plain, made = (state(METHODS[name], len(lengths)) for _ in range(2))
    start(plain, lengths), start(made, lengths)
    layers, joined = in_slots([made], ROOM)
    taken, allowed, shape, index = tables_of(layers), 0, made.shape, made.index
    assert isinstance(index, UnitIndex)
    for b in range(len(lengths)):
        zones, units = made.store.zones(b), units_of(made, b)
        tokens_to_come = zones.local + zones.buffer + ROOM + 1
        units_to_come = ROOM + 1 if name == "segments" else tokens_to_come // 3 + 1
        scores = 4 * shape.query_heads // shape.kv_heads
        unit = units.reps.shape[2] * units.reps.element_size() + 4 + scores
        allowed += units.nbytes + shape.kv_heads * (4 * tokens_to_come + unit * units_to_come)
        allowed += shape.kv_heads * scores * (units.reps.shape[1] + 16)  # which are rounded up
    allowed += 1_500 * len(lengths) * shape.kv_heads  # tails, results, scratch of the searches
    assert sum(units_of(made, b).nbytes for b in range(len(lengths))) < taken <= allowed
    for number in range(ROOM):  # as many as it has room for
        new = tokens(1000 + 3 * number, len(lengths), 1)
        expected = decode_step(plain, *new, None, PARAMS)
        torch.testing.assert_close(make(layers, number, new), expected, atol=2e-6, rtol=2e-6)
    assert taken == tables_of(layers)
    layers.leave(joined)
    for b in range(len(lengths)):
        ours, theirs = units_of(made, b), units_of(plain, b)
        assert torch.equal(ours.members, theirs.members) and torch.equal(ours.offsets, theirs.offsets)
        torch.testing.assert_close(ours.reps, theirs.reps)
    assert tables_of(layers) < units_of(made, 1).nbytes / 4  # slots without a sequence have none


@pytest.mark.parametrize("name", METHODS)
def test_units_stay_inside_their_table(name: str) -> None:
    """However many the steps bring: with segments of one token, one in each step."""
    made = state(METHODS[name], 2)
    start(made, [SHORT, 90])
    layers, _ = in_slots([made], ROOM)
    part: Any = layers.all[0].part  # type: ignore[attr-defined]
    tables, before = dict(part.tables), part.plan.clone()
    for number in range(ROOM):
        make(layers, number, tokens(1000 + 3 * number, 2, 1))
    rows = part.plan.view(2, 2, -1)
    assert part.tables == tables
    for slot, table in tables.items():
        assert table.offsets.shape[1] == table.reps.shape[1] + 1
        assert int(rows[slot, :, 0].max()) <= table.reps.shape[1] and int(rows[slot, :, 1].max()) <= table.members.shape[1]
    assert torch.equal(before[:, 2:], part.plan[:, 2:]) and bool((before[:, :2] < part.plan[:, :2]).all())


class Copies(TorchDispatchMode):
    """Counts the bytes that copies write."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.copy_, torch.ops.aten.clone, torch.ops.aten.cat, torch.ops.aten._to_copy):
            self.bytes += out.nbytes
        return out


@pytest.mark.parametrize("name", METHODS)
def test_a_join_copies_the_units_once(name: str) -> None:
    """Taken over again, as after a trial, and given back with nothing new, they stay where they are."""
    made = state(METHODS[name], 1)
    start(made, [LONG])
    joined = SlotLease([made], [0], ROOM)
    units, layers = units_of(made), Layers([made], 1, 2048)
    held, little = copied(units), units.nbytes // 3  # the window's rows, say
    with Copies() as first:
        layers.join(joined)
    assert first.bytes <= units.nbytes + little
    there = units_of(made).reps.data_ptr()
    with Copies() as again:
        layers.forget_trial()
    for number in range(2):  # nothing leaves the window
        make(layers, number, tokens(1000 + 3 * number, 1, 1))
    with Copies() as back:
        layers.leave(joined)
    assert again.bytes <= little and back.bytes <= little
    assert units_of(made).reps.data_ptr() == there
    assert_equal(units_of(made), held)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("when", ["joined", "stepped", "left"])
def test_a_copy_of_a_sequence_sees_no_later_step(name: str, when: str) -> None:
    """Made while the sequence is in a slot, before and after it has grown there, or when it has left; the slot serves others
    afterwards."""
    method, pool = METHODS[name], BlockPool(16)
    plain, made, other = state(method, 1), *(state(method, 1, tables=[BlockTable(pool)]) for _ in range(2))
    start(plain, [75]), start(made, [75]), start(other, [98], 50)
    joined = SlotLease([made], [0], ROOM)
    layers = Layers([made], 1, 192)
    layers.join(joined)
    before = copied(units_of(made))
    forks = []
    for number in range(14):
        if (when, number) in (("joined", 0), ("stepped", 12)):
            forks.append(made.fork(method))
        make(layers, number, tokens(1000 + 3 * number, 1, 1))
    layers.leave(joined)
    if when == "left":
        forks.append(made.fork(method))
        before = copied(units_of(made))
    assert units_of(made).members.shape[1] > before[1].shape[1] or when == "left"
    joined = SlotLease([other], [0], ROOM)
    layers.join(joined)
    for number in range(14):
        make(layers, number, tokens(3000 + 3 * number, 1, 1))
        decode_step(made, *tokens(4000 + 3 * number, 1, 1), None, PARAMS)
    assert_equal(units_of(forks[0]), before)
    layers.leave(joined)
    assert_equal(units_of(forks[0]), before)
    if when == "joined":  # and goes on from there
        for number in range(14):
            new = tokens(5000 + 3 * number, 1, 1)
            torch.testing.assert_close(decode_step(forks[0], *new, None, PARAMS), decode_step(plain, *new, None, PARAMS))


@pytest.mark.parametrize("name", METHODS)
def test_units_are_as_they_were_where_they_cannot_be_given_back(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory runs out behind steps in which pages and segments have grown; no memory is asked for then."""
    made = state(METHODS[name], 1)
    start(made, [75])
    layers, joined = in_slots([made], ROOM)
    before, part = copied(units_of(made)), layers.all[0].part  # type: ignore[attr-defined]
    for number in range(14):
        make(layers, number, tokens(1000 + 3 * number, 1, 1))

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr(part, "leave", fail)
        layers.leave(joined)
    assert_equal(units_of(made), before)
    assert not part.tables and not part.plan.any()

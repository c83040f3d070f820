"""The refresh of static sets, a share of it before each of several steps, and what may happen to it in between."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import kvrecall
from kvrecall.cache import copies, zone_rows
from kvrecall.core import pieces
from kvrecall.layer.pipeline import decode_step, prefill_layer
from kvrecall.layer.state import LayerState
from kvrecall.layer.stats import CacheStats
from kvrecall.static import sets as static_sets
from tests.layers import PARAMS, state, tokens

INTERVAL, LEAD, PIECE = 12, 4, 8
FIRST = INTERVAL + LEAD
"""Steps that the first set of layer 0 lasts."""
ZONES: dict[str, Any] = {"sink_tokens": 3, "local_tokens": 9, "update_interval": 5, "full_attention_threshold": 0}
METHODS = {
    "pages": kvrecall.PRKV(
        top_k=16, page_tokens=4, window_tokens=6, refresh_interval=INTERVAL, refresh_lead_tokens=LEAD, static_ratio=0.5, **ZONES
    ),
    "clusters": kvrecall.Method(
        top_k=12, index="clusters:cluster_tokens=4,stretch_tokens=32,max_segment_tokens=5",
        static=f"observation-window:ratio=online,window_tokens=6,interval={INTERVAL},page_tokens=1,lead_tokens={LEAD}", **ZONES,
    ),
    "sphere": kvrecall.ParisKV(
        top_k=12, static=f"observation-window:window_tokens=6,interval={INTERVAL},page_tokens=1,lead_tokens={LEAD}", **ZONES,
    ),
    "completed": kvrecall.Method(
        top_k=12, index="pages:page_tokens=4", estimate="page-means",
        static=f"observation-window:window_tokens=6,interval={INTERVAL},page_tokens=1,lead_tokens={LEAD}", **ZONES,
    ),
}  # fmt: skip
every_index = pytest.mark.parametrize("name", METHODS)


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PIECE_TOKENS", PIECE)


def course(name: str, lengths: int = 150, sequences: int = 1) -> LayerState:
    made = state(METHODS[name], sequences)
    prefill_layer(made, *tokens(1, sequences, lengths), None, PARAMS)
    return made


def go(layer: LayerState, first: int, steps: int) -> list[Tensor]:
    """The steps first .. first + steps - 1, the same ones for every state with as many sequences."""
    return [
        decode_step(layer, *tokens(100 + 3 * n, layer.shape.sequences, 1), None, PARAMS) for n in range(first, first + steps)
    ]


def ids(layer: LayerState, b: int = 0) -> Tensor:
    chosen = layer.static[b]
    assert chosen is not None
    return chosen.ids


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many keys of the zone are read from now on, by read."""
    read: list[int] = []

    def spy(source: copies.RowSource, start: int, keys: Tensor) -> None:
        read.append(keys.shape[1])
        copies.read_keys(source, start, keys)

    for module in (static_sets, zone_rows):
        monkeypatch.setattr(module, "read_keys", spy)
    return read


def test_no_step_does_more_than_its_share_and_keys_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = course("pages")
    go(layer, 0, FIRST - LEAD)
    zone, read = layer.store.zones(0).retrieval, counted(monkeypatch)
    by_step = []
    for number in range(FIRST - LEAD, FIRST):
        go(layer, number, 1)
        by_step.append(sum(read))
        assert all(count <= PIECE for count in read)
        read.clear()
    most = zone * 8 / 5 / LEAD + PIECE  # five eighths of the work are reading
    assert sum(by_step) == zone and all(count <= most for count in by_step) and by_step[1] > 0
    before, arrived = ids(layer), layer.store.zones(0).retrieval - zone
    go(layer, FIRST, 1)
    assert ids(layer) is not before and sum(read) == arrived > 0  # what came since is all that is missing in the pages


def test_a_refresh_begins_neither_too_early_nor_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, read = course("pages"), counted(monkeypatch)
    zone = layer.store.zones(0).retrieval
    go(layer, 0, 1)
    assert sum(read) == zone  # the first set
    read.clear()
    go(layer, 1, FIRST - LEAD - 1)
    assert not read


@every_index
def test_how_the_work_is_cut_changes_nothing(name: str) -> None:
    layer = course(name)
    go(layer, 0, 3)
    found = []
    for shares in ([1.0], [0.0, 0.1, 0.100001, 0.7, 1.0], [n / 100 for n in range(101)]):
        refresh = layer.refresh(0, layer.store.resident_keys(0), layer.store.zones(0).retrieval)
        assert refresh is not None
        for share in shares:
            refresh.advance(share)
        assert refresh.chosen is not None
        found.append(refresh.chosen)
    for one in found[1:]:
        assert torch.equal(one.ids, found[0].ids) and torch.equal(one.rows, found[0].rows)
        if name == "pages":
            assert torch.equal(one.pages.units.reps, found[0].pages.units.reps)
            assert torch.equal(one.pages.units.members, found[0].pages.units.members)


@every_index
@pytest.mark.parametrize("at", [FIRST - LEAD + 1, FIRST - 1, FIRST])
def test_copies_in_the_middle_go_on_to_the_same_set(name: str, at: int) -> None:
    layer = course(name, sequences=2)
    go(layer, 0, at)
    copies = [layer.fork(layer.method), layer.select([0, 1])]
    swapped = layer.select([1, 0])
    expected = go(layer, at, 6)
    for copy in copies:
        assert all(torch.equal(*pair) for pair in zip(go(copy, at, 6), expected, strict=True))
        assert all(torch.equal(ids(copy, b), ids(layer, b)) for b in range(2))
    for number in range(at, at + 6):
        decode_step(swapped, *(x.flip(0) for x in tokens(100 + 3 * number, 2, 1)), None, PARAMS)
    assert all(torch.equal(ids(swapped, b), ids(layer, 1 - b)) for b in range(2))


def test_what_a_copy_does_leaves_the_original_alone() -> None:
    layer, alone = course("pages"), course("pages")
    for one in (layer, alone):
        go(one, 0, FIRST - 2)
    other = layer.select([0])
    for number in range(9):
        decode_step(other, *tokens(9000 + 3 * number, 1, 1), None, PARAMS)
    assert all(torch.equal(*pair) for pair in zip(*(go(one, FIRST - 2, 6) for one in (layer, alone)), strict=True))


def crop(layer: LayerState) -> None:
    layer.crop(0, layer.store.zones(0).total - 3)  # three of the six last queries are left


def another_prompt(layer: LayerState) -> None:
    prefill_layer(layer, *tokens(70, 1, 21), None, PARAMS)


@every_index
@pytest.mark.parametrize("change", [crop, another_prompt])
def test_what_was_under_way_is_dropped_with_what_it_saw(name: str, change: Callable[[LayerState], None]) -> None:
    """The next step chooses at once, by the queries that are left."""
    layer = course(name)
    go(layer, 0, FIRST - 1)
    change(layer)
    seen, zone = layer.log and layer.log.seen(0), layer.store.zones(0).retrieval
    assert seen is not None
    go(layer, 50, 1)
    static = layer.static_config
    assert static is not None and layer.static[0] is not None and layer.static[0].age == -LEAD
    keys = torch.cat(list(layer.store.blocks(0)), 1)[:, :, 0]
    others = [(keys[:, :3], 0), (keys[:, 3 + zone :], 3 + zone)]
    sight = static_sets.Observation(seen, others, 3, layer.top_k, layer.scaling, layer.statics.count(0))
    assert torch.equal(static.choose(keys[:, 3 : 3 + zone], sight), ids(layer))
    go(layer, 51, FIRST)
    assert layer.static[0].age == 0


def test_what_is_dropped_is_gone_at_once() -> None:
    """Its memory is that of all keys of a layer."""
    layer = course("pages")
    go(layer, 0, FIRST - 2)
    refresh = layer.statics._refreshes[0]
    assert refresh is not None and refresh.chosen is None
    gone, keys = weakref.ref(refresh), weakref.ref(refresh._work.gi_frame.f_locals["zone"])
    del refresh
    gc.disable()
    try:
        crop(layer)
        assert gone() is None and keys() is None
    finally:
        gc.enable()


def test_after_an_error_it_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = course("pages")
    go(layer, 0, 2)
    refresh, other = (layer.refresh(0, layer.store.resident_keys(0), layer.store.zones(0).retrieval) for _ in range(2))
    assert refresh is not None and other is not None
    refresh.advance(0.3)
    with monkeypatch.context() as patch:
        patch.setattr(static_sets, "read_keys", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError))
        with pytest.raises(torch.OutOfMemoryError):
            refresh.advance(0.6)
    refresh.advance(0.6), refresh.advance(1), other.advance(1)
    assert refresh.chosen is not None and other.chosen is not None
    assert torch.equal(refresh.chosen.ids, other.chosen.ids)


def test_steps_of_either_mode_may_do_the_work() -> None:
    """Memory made in inference mode could not be written to outside it."""
    plain, mixed = course("pages"), course("pages")
    for number in range(FIRST + 2):
        with torch.inference_mode(number % 2 == 0):
            go(mixed, number, 1)
        go(plain, number, 1)
    assert torch.equal(ids(mixed), ids(plain))


def test_memory_of_a_refresh_is_counted_and_goes_when_nobody_decodes() -> None:
    """The keys that a set is chosen from: while it is under way, until a pause or the next prompt."""
    layer, other = course("pages"), course("pages")
    for one in (layer, other):
        go(one, 0, FIRST - LEAD)
    before = layer.statics.nbytes
    for one in (layer, other):
        go(one, FIRST - LEAD, 2)
    shape, zone = layer.shape, layer.store.zones(0).retrieval
    keys = layer.statics.nbytes - before
    assert 0 <= zone - keys // (shape.kv_heads * shape.head_dim * 4) < ZONES["update_interval"] + 1
    assert CacheStats.collect(layer.method, [layer]).total.device_bytes >= layer.statics.nbytes + layer.store.resident.nbytes
    layer.statics.pause()
    assert layer.statics.nbytes == before
    go(layer, FIRST - LEAD + 2, LEAD), go(other, FIRST - LEAD + 2, LEAD)
    assert torch.equal(ids(layer), ids(other))  # the next steps make up for it
    go(layer, FIRST + 2, INTERVAL - LEAD)
    assert layer.statics.nbytes > before
    prefill_layer(layer, *tokens(7, 1, 9), None, PARAMS)
    assert layer.statics.nbytes == before

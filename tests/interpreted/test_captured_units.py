"""Captured layers that search units, or nothing, launched step by step without a graph, do what the pipeline does."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import kvrecall
from kvrecall.cache import zone_rows
from kvrecall.cache.copies import RowSource, read_keys
from kvrecall.cache.slot_zones import ZONE_NUMBERS
from kvrecall.core import pieces
from kvrecall.core.errors import CaptureError
from kvrecall.core.structs import AttentionParams
from kvrecall.layer.pipeline import decode_step, prefill_layer
from kvrecall.layer.state import LayerState
from kvrecall.static import sets as static_sets
from tests.layers import DIM, ZONES, start, state, tokens

pytest.importorskip("triton", reason="Triton is only there on Linux")
from kvrecall.layer.slots.base import require_pinned
from tests.interpreted.slots import in_slots

pytestmark = pytest.mark.usefixtures("several_blocks")

PARAMS = AttentionParams(DIM**-0.5)
CLUSTERS: dict[str, Any] = {"dense_layers": (), "cluster_tokens": 4, "stretch_tokens": 32, "max_segment_tokens": 6}
CLUSTERED = "clusters:cluster_tokens=4,stretch_tokens=32,max_segment_tokens=6"
PAGES: dict[str, Any] = {
    "page_tokens": 4,
    "window_tokens": 6,
    "refresh_interval": 5,
    "refresh_lead_tokens": 3,
    "static_ratio": 0.5,
}
METHODS = {
    "louiskv": kvrecall.LouisKV(top_k=9, threshold=0.0, **CLUSTERS, **ZONES),
    "louiskv-retrieval": kvrecall.LouisKV(top_k=9, threshold=0.0, compare="retrieval", max_stride=3, **CLUSTERS, **ZONES),
    "stride": kvrecall.LouisKV(top_k=9, trigger="fixed-stride:steps=3", gqa="max", **CLUSTERS, **ZONES),
    "prkv": kvrecall.PRKV(top_k=16, **PAGES, **ZONES),
    "prkv-aligned": kvrecall.PRKV(top_k=16, **PAGES | {"refresh_interval": 8}, **ZONES),
    "prkv-at-once": kvrecall.PRKV(top_k=16, **PAGES | {"refresh_lead_tokens": 0}, **ZONES),
    "landmarks": kvrecall.Method(
        top_k=10, index="pages:page_tokens=4,bounds=mean", static="outlier-pages:pages=1,page_tokens=2", **ZONES
    ),
    "early": kvrecall.Method(
        top_k=10, index="pages:page_tokens=3,bounds=min-max", gqa="max", trigger="speculative:threshold=0.0", **ZONES
    ),
    "mixed": kvrecall.Method(
        top_k=12, index=CLUSTERED, trigger="semantic-boundary:threshold=0.0",
        static="observation-window:ratio=online,window_tokens=5,interval=4,page_tokens=1,lead_tokens=2", **ZONES,
    ),
}  # fmt: skip


def both(method: kvrecall.Method, warm: int, lengths: list[int], small: bool = False) -> tuple[LayerState, LayerState]:
    """Two states of one ragged prompt, a few steps further. small: rows on the host are in eight bits."""
    plain, other = (state(method, len(lengths), small=small) for _ in range(2))
    start(plain, lengths), start(other, lengths)
    for number in range(warm):
        new = tokens(500 + 3 * number, len(lengths), 1)
        decode_step(plain, *new, None, PARAMS), decode_step(other, *new, None, PARAMS)
    return plain, other


def go_on(
    plain: LayerState, other: LayerState, steps: int, seed: int, params: AttentionParams = PARAMS, ahead: bool = False
) -> None:
    """Captured steps beside uncaptured ones; every output and every selection must agree. ahead: each step, also one that does
    not follow, is prepared while the one before runs."""
    b = plain.shape.sequences
    layers, joined = in_slots([other], steps)
    layers.prepare(trial=True)
    layers.all[0].step(*tokens(9, b, 1), torch.zeros(1, dtype=torch.int64), params)
    layers.forget_trial()
    for number in range(steps):
        new = tokens(seed + 3 * number, b, 1)
        expected = decode_step(plain, *new, None, params)
        layers.prepare()
        if layers.all[0].early:
            layers.all[0].search_early()
        out = layers.all[0].step(*new, torch.tensor([number % 2]), params)
        layers.advance()
        torch.testing.assert_close(
            out, expected, atol=2e-6, rtol=2e-6, msg=lambda text, number=number: f"step {number}: {text}"
        )
        if ahead:
            layers.prepare_ahead()
        if plain.index is not None:
            zones = layers.all[0].zones
            on_device = zones.rows.view(b, -1, ZONE_NUMBERS)[:, 0, 4:6].tolist()
            assert [[own.retrieval, own.total - own.sink] for own in zones.lengths(joined.numbers)] == on_device
    layers.leave(joined)


def same(plain: LayerState, other: LayerState) -> None:
    """What the steps left behind."""
    for b in range(plain.shape.sequences):
        assert other.store.zones(b) == plain.store.zones(b)
        assert torch.equal(other.store.resident.view(b), plain.store.resident.view(b))
        rows = [torch.cat(list(x.store.host[b].blocks()), 1) for x in (other, plain)]
        assert torch.equal(*rows)
        if plain.index is None:
            continue
        width = min(other.held[b].ids.shape[1], plain.held[b].ids.shape[1])
        assert torch.equal(other.held[b].ids[:, :width], plain.held[b].ids[:, :width])
        assert torch.equal(other.held[b].counts, plain.held[b].counts)
        units = [x.index.units(b) for x in (other, plain)]
        assert torch.equal(units[0].members, units[1].members) and torch.equal(units[0].offsets, units[1].offsets)
        torch.testing.assert_close(units[0].reps, units[1].reps)
        if plain.static[b] is not None:
            assert torch.equal(other.static[b].ids, plain.static[b].ids) and other.static[b].age == plain.static[b].age
    if plain.segments is not None:
        assert other.segments.starts == plain.segments.starts
    for name in ("steps", "searches", "attended_tokens", "attended_rows", "retrieved_tokens", "static_tokens"):
        assert getattr(other.stats, name) == getattr(plain.stats, name), name


SMALL = ["louiskv", "prkv", "landmarks"]


@pytest.mark.parametrize(("name", "small"), [*((name, False) for name in METHODS), *((name, True) for name in SMALL)])
def test_steps_and_what_is_left_behind_are_the_pipelines(name: str, small: bool) -> None:
    """Segments of several lengths leave while the trigger fires and holds; static sets are chosen anew in between."""
    plain, other = both(METHODS[name], 5, [74, 55], small)
    before = plain.stats.searches
    go_on(plain, other, 5 if name == "early" else 9, 1000)
    same(plain, other)
    if "louiskv" in name:
        assert 4 <= plain.stats.searches - before <= 14  # of 18: it holds and it fires
    for number in range(3):  # and the pipeline can go on with it
        new = tokens(3000 + number, 2, 1)
        torch.testing.assert_close(decode_step(other, *new, None, PARAMS), decode_step(plain, *new, None, PARAMS))


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5, 9])
@pytest.mark.parametrize("name", ["prkv", "prkv-at-once", "mixed", "landmarks", "louiskv"])
def test_a_decode_may_end_when_the_next_step_is_prepared(name: str, steps: int) -> None:
    plain, other = both(METHODS[name], 1, [74, 55])
    go_on(plain, other, steps, 1000, ahead=True)
    for number in range(3):
        new = tokens(3000 + number, 2, 1)
        torch.testing.assert_close(decode_step(other, *new, None, PARAMS), decode_step(plain, *new, None, PARAMS))
    same(plain, other)


def test_room_that_cannot_be_page_locked_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels would read memory that no GPU can; what was there before is as it was."""
    plain, other = both(METHODS["prkv"], 2, [74, 55])
    gpu = SimpleNamespace(
        shape=SimpleNamespace(device=torch.device("cuda")), store=SimpleNamespace(memory=SimpleNamespace(pinned=False))
    )
    with monkeypatch.context() as patch:
        patch.setattr("kvrecall.layer.slots.layers.require_pinned", lambda _: require_pinned(gpu))
        with pytest.raises(CaptureError, match=r"refused to pin host memory.*ulimit"):
            in_slots([other], 5)
    go_on(plain, other, 3, 1000)
    same(plain, other)


def test_a_refresh_sees_what_has_left_the_window_since_the_capture() -> None:
    """Kernels have stored those rows; the host counts them in only when the layer is given back."""
    method = kvrecall.PRKV(top_k=16, **PAGES | {"refresh_interval": 22, "static_ratio": 0.9}, **ZONES)
    plain, other = both(method, 2, [74, 55])
    for b in range(2):
        other.store.host[b].ensure_blocks(200)
        for rows in other.store.host[b].blocks(other.store.host[b].length, 200):
            rows.fill_(float("nan"))
    go_on(plain, other, 24, 1000)
    same(plain, other)


@pytest.mark.parametrize("name", ["louiskv", "prkv"])
def test_a_prompt_that_has_just_ended_and_a_second_turn(name: str) -> None:
    plain, other = both(METHODS[name], 0, [74, 55])
    go_on(plain, other, 5, 1000)
    same(plain, other)
    chunk = tokens(70, 2, 13)
    prefill_layer(other, *chunk, None, PARAMS), prefill_layer(plain, *chunk, None, PARAMS)
    go_on(plain, other, 4, 2000, AttentionParams(DIM**-0.5, softcap=5.0, sink_logits=torch.tensor([0.3, -1.0, 2.0, 0.0])))
    same(plain, other)


@pytest.mark.parametrize("name", ["prkv", "mixed"])
def test_a_decode_that_ends_in_the_middle_of_a_refresh(name: str) -> None:
    """Captured and uncaptured steps, in turn, go on with what is under way."""
    plain, other = both(METHODS[name], 2, [74, 55])
    under_way = 0
    for number, steps in enumerate([1, 2, 1, 1, 3]):
        go_on(plain, other, steps, 1000 + 100 * number)
        same(plain, other)
        refreshes = [[r and r._spent for r in one.statics._refreshes] for one in (plain, other)]
        assert refreshes[0] == refreshes[1]
        under_way += any(refreshes[0])
        new = tokens(5000 + 10 * number, 2, 1)
        torch.testing.assert_close(decode_step(other, *new, None, PARAMS), decode_step(plain, *new, None, PARAMS))
    same(plain, other)
    assert under_way >= 2


def failing(*_: object) -> None:
    raise torch.OutOfMemoryError


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize(("name", "first", "lead"), [("prkv-aligned", 8 + 3, 3), ("mixed", 4 + 2, 2)])
def test_no_captured_step_waits_for_all_keys(
    name: str, first: int, lead: int, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is read once, in the steps of the lead; where that fails, the next call makes up for it."""
    plain, other = both(METHODS[name], 1, [74])
    (layers, joined), read, by_step = in_slots([other], first), [], []

    def spy(source: RowSource, start: int, keys: torch.Tensor) -> None:
        read.append(keys.shape[1])
        read_keys(source, start, keys)

    monkeypatch.setattr(pieces, "PIECE_TOKENS", 4)
    zones, chosen = list[int](), other.static[0]
    for number in range(first):
        zones.append(plain.store.zones(0).retrieval)
        if fails and number == first - lead:  # the second share of the work
            with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
                patch.setattr(static_sets, "read_keys", failing)
                layers.prepare()
        with monkeypatch.context() as patch:
            for module in (static_sets, zone_rows):
                patch.setattr(module, "read_keys", spy)
            layers.prepare()
        by_step.append(sum(read))
        read.clear()
        new = tokens(1000 + 3 * number, 1, 1)
        out = layers.all[0].step(*new, torch.tensor([number % 2]), PARAMS)
        layers.advance()
        torch.testing.assert_close(out, decode_step(plain, *new, None, PARAMS), atol=2e-6, rtol=2e-6)
    zone, grown = zones[-1 - lead], zones[-1] - zones[0] if name == "prkv-aligned" else 0
    assert other.static[0] is not chosen and not by_step[0]
    assert by_step[-1] == grown, "pages take in what has left the window since the sequence joined"
    assert fails or (sum(by_step[:-1]) == zone and max(by_step) <= zone * 8 / 5 / lead + 4)
    layers.leave(joined)
    same(plain, other)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize(("name", "first", "lead"), [("prkv-aligned", 8 + 3, 3), ("mixed", 4 + 2, 2)])
def test_keys_are_read_while_the_step_before_runs(
    name: str, first: int, lead: int, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where that fails, the work starts again before the next step."""
    plain, other = both(METHODS[name], 1, [74])
    (layers, joined), read = in_slots([other], first + 1), {"before": 0, "beside": 0}
    monkeypatch.setattr(pieces, "PIECE_TOKENS", 4)

    def watched(when: str, work: Callable[[], None]) -> None:
        def spy(source: RowSource, start: int, keys: torch.Tensor) -> None:
            if fails and when == "beside":
                raise torch.OutOfMemoryError
            read[when] += keys.shape[1]
            read_keys(source, start, keys)

        with monkeypatch.context() as patch:
            for module in (static_sets, zone_rows):
                patch.setattr(module, "read_keys", spy)
            work()

    zones, chosen = list[int](), other.static[0]
    for number in range(first + 1):
        zones.append(plain.store.zones(0).retrieval)
        watched("before", layers.prepare)
        new = tokens(1000 + 3 * number, 1, 1)
        out = layers.all[0].step(*new, torch.tensor([number % 2]), PARAMS)
        layers.advance()
        watched("beside", layers.prepare_ahead)
        torch.testing.assert_close(out, decode_step(plain, *new, None, PARAMS), atol=2e-6, rtol=2e-6)
        if number == first - 1:
            assert other.static[0] is not chosen
            read["beside"] -= zones[-1] - zones[0] if name == "prkv-aligned" and not fails else 0  # taken in by pages
            assert read == {"before": 0, "beside": zones[-1]} or (fails and read["before"] >= zones[-1] and not read["beside"])
    layers.leave(joined)
    same(plain, other)


@pytest.mark.parametrize("where", ["put", "load"])
@pytest.mark.parametrize(("name", "first"), [("prkv", 5 + 3), ("mixed", 4 + 2)])
def test_a_set_that_cannot_take_its_place_does_so_later(
    name: str, first: int, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory runs out when the state has been given back; the next call, or closing the decode, goes on from there."""
    for closes in (False, True):
        plain, other = both(METHODS[name], 1, [74, 55])
        (layers, joined), chosen = in_slots([other], first + 2), other.static[0]
        for number in range(first + 2):
            if number == first - 1:  # the set is due
                target, what = (static_sets.StaticRefresh, "put") if where == "put" else (type(layers.all[0]), "_take_over")
                with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
                    patch.setattr(target, what, failing)
                    layers.prepare()
                if closes:
                    break
            layers.prepare()
            new = tokens(1000 + 3 * number, 2, 1)
            out = layers.all[0].step(*new, torch.tensor([number % 2]), PARAMS)
            layers.advance()
            torch.testing.assert_close(out, decode_step(plain, *new, None, PARAMS), atol=2e-6, rtol=2e-6)
        layers.leave(joined)
        if closes:
            for number in range(first - 1, first + 2):  # uncaptured from here on
                new = tokens(1000 + 3 * number, 2, 1)
                torch.testing.assert_close(decode_step(other, *new, None, PARAMS), decode_step(plain, *new, None, PARAMS))
        same(plain, other)
        assert other.static[0] is not chosen


def test_a_dense_layer_in_eight_bits_is_refused() -> None:
    method = kvrecall.LouisKV(top_k=9, **CLUSTERS | ZONES | {"dense_layers": (0,)})
    plain, other = both(method, 2, [74, 55], small=True)
    with pytest.raises(CaptureError, match=r'layer 0 searches nothing.*eight bits.*host_rows="plain"'):
        in_slots([other], 5)
    for number in range(3):  # and goes on uncaptured
        new = tokens(3000 + number, 2, 1)
        assert torch.equal(decode_step(other, *new, None, PARAMS), decode_step(plain, *new, None, PARAMS))


def test_tokens_are_summarised_as_they_are_stored() -> None:
    """An index over single tokens, whose summaries are written when a token comes."""
    plain, other = both(kvrecall.Exact(top_k=9, **ZONES), 2, [74, 55], small=True)
    go_on(plain, other, 9, 1000)
    for b in range(2):
        assert torch.equal(other.index.tables["keys"].gather(b), plain.index.tables["keys"].gather(b))
        assert torch.equal(other.held[b].ids, plain.held[b].ids)
        rows = [torch.cat(list(x.store.host[b].blocks()), 1) for x in (other, plain)]
        assert torch.equal(*rows) and torch.equal(rows[0][:, :, 0], plain.index.tables["keys"].gather(b))


@pytest.mark.parametrize("gqa", ["mean_softmax", "max_softmax", "max"])
def test_a_zone_with_fewer_tokens_than_the_budget(gqa: str) -> None:
    """No token of the window is found, whatever makes a rank of scores."""
    plain, other = both(kvrecall.Exact(top_k=40, gqa=gqa, **ZONES), 2, [40, 35], small=True)
    go_on(plain, other, 9, 1000)


def test_a_dense_layer() -> None:
    method = kvrecall.LouisKV(top_k=9, **CLUSTERS | ZONES | {"dense_layers": (0,)})
    plain, other = both(method, 6, [74, 55])
    go_on(plain, other, 3, 1000)
    same(plain, other)

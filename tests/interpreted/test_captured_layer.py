"""A captured layer, launched step by step without a graph, does what the pipeline does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import kvrecall
from kvrecall.core.structs import AttentionParams
from kvrecall.index.sphere import SphereIndex
from kvrecall.index.sphere.codes import weight_values
from kvrecall.index.statistics import LayerStatistics
from kvrecall.layer.pipeline import decode_step, prefill_layer
from kvrecall.layer.state import LayerState
from tests.index.sphere.with_statistics import Halves, Model, usual
from tests.layers import DIM, ZONES, left_padded, start, state, tokens

pytest.importorskip("triton", reason="Triton is only there on Linux")
from kvrecall.layer.slots.search import SearchSlots
from tests.interpreted.slots import in_slots

pytestmark = pytest.mark.usefixtures("several_blocks")


def at_any_position(seed: int, batch: int, count: int, first: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Random queries, keys and values."""
    return tokens(seed, batch, count)


def compare(
    method: kvrecall.Method,
    steps: int,
    params: AttentionParams,
    warm: int = 6,
    atol: float = 2e-6,
    lengths: tuple[int, int] = (90, 61),
    statistics: LayerStatistics | None = None,
    draw: Callable[[int, int, int, list[int]], tuple[Tensor, Tensor, Tensor]] = at_any_position,
    small: bool = False,
) -> tuple[LayerState, LayerState]:
    """Runs both from the same prompt; every output must agree; returns the states (pipeline's, captured). small: rows on
    the host are in eight bits."""
    plain, other = (state(method, 2, statistics=statistics, small=small) for _ in range(2))
    longest = max(lengths)
    for layer in (plain, other):
        prompt = draw(0, 2, longest, [n - longest for n in lengths])
        prefill_layer(layer, *prompt, None if len(set(lengths)) == 1 else left_padded(list(lengths)), params)
    for number in range(warm):
        new = draw(500 + number, 2, 1, [n + number for n in lengths])
        decode_step(plain, *new, None, params), decode_step(other, *new, None, params)
    layers, joined = in_slots([other], 64)
    captured, now = layers.all[0], torch.ones(1, dtype=torch.int64)
    for number in range(steps):
        new = draw(1000 + number, 2, 1, [n + warm + number for n in lengths])
        expected = decode_step(plain, *new, None, params)
        layers.prepare()
        if captured.early:
            captured.search_early()
        out: Tensor = captured.step(*new, now, params)
        layers.advance()
        now += 1
        torch.testing.assert_close(out, expected, atol=atol, rtol=2e-6)
    layers.leave(joined)
    return plain, other


EXACT: dict[str, Any] = ZONES | {"top_k": 6, "weight_dtype": "float32"}  # the interpreter rounds to bf16 in a way of its own
METHODS = {
    "collisions": kvrecall.ParisKV(fetch="direct:reuse=false", **EXACT),
    "products": kvrecall.ParisKV(stage1="product", gqa="mean_softmax", fetch="direct:reuse=true", **EXACT),
    "stride": kvrecall.ParisKV(stage1="product", trigger="fixed-stride:steps=3", **EXACT),
    "semantic": kvrecall.ParisKV(stage1="product", gqa="max", trigger="semantic-boundary:threshold=0.0", **EXACT),
    "early": kvrecall.ParisKV(
        stage1="product", gqa="mean_softmax", trigger="speculative:threshold=0.0", **EXACT | {"update_interval": 7}
    ),
    "balanced": kvrecall.methods.get("pariskv-balanced", **EXACT),
    "balanced-eight-bits": kvrecall.methods.get("pariskv-balanced", **EXACT | {"weight_dtype": "uint8", "gqa": "max"}),
    "balanced-early": kvrecall.methods.get(
        "pariskv-balanced", trigger="speculative:threshold=0.0", **EXACT | {"update_interval": 7}
    ),
    "balanced-collisions": kvrecall.ParisKV(balance=True, gqa="max", trigger="fixed-stride:steps=2", **EXACT),
    "reused": kvrecall.methods.get("pariskv-balanced", gqa="max", fetch="direct:reuse=true", **EXACT),
    "norms": kvrecall.methods.get("pariskv-balanced", center=False, **EXACT),
    "semantic-retrieval": kvrecall.ParisKV(
        stage1="product", trigger="semantic-boundary:threshold=0.0,compare=retrieval,max_stride=3", **EXACT
    ),
}


SMALL = ["collisions", "products", "balanced", "balanced-early", "reused"]


@pytest.mark.parametrize(("name", "small"), [*((name, False) for name in METHODS), *((name, True) for name in SMALL)])
def test_steps_and_what_is_left_behind_are_the_pipelines(name: str, small: bool) -> None:
    method, params = METHODS[name], AttentionParams(DIM**-0.5)
    plain, other = compare(method, 4, params, small=small)  # the buffer of 8 fills up in between
    for b in range(2):
        assert other.store.zones(b) == plain.store.zones(b)
        assert torch.equal(other.store.resident.view(b), plain.store.resident.view(b))
        assert all(torch.equal(x, y) for x, y in zip(other.store.host[b].blocks(), plain.store.host[b].blocks(), strict=True))
        assert torch.equal(other.index.codes(b).signs, plain.index.codes(b).signs)
        assert torch.equal(other.index.codes(b).magnitudes, plain.index.codes(b).magnitudes)
        made, expected = other.index.codes(b), plain.index.codes(b)
        torch.testing.assert_close(weight_values(made.weights), weight_values(expected.weights), rtol=1e-5, atol=0)
        assert (made.norms is None) == (expected.norms is None) == (not getattr(method, "norms", False))
        if made.norms is not None and expected.norms is not None:
            assert torch.equal(made.norms, expected.norms) and made.norms.all()
        assert torch.equal(other.index.maps.keys, plain.index.maps.keys)
        assert torch.equal(other.index.counts, plain.index.counts)
        assert torch.equal(other.held[b].ids, plain.held[b].ids)
    for name in ("steps", "searches", "attended_tokens", "attended_rows", "retrieved_tokens"):
        assert getattr(other.stats, name) == getattr(plain.stats, name), name
    bytes_selected = [x.stats.bytes_fetched + x.stats.bytes_saved for x in (other, plain)]
    assert bytes_selected[0] == bytes_selected[1] > 0
    reuse = method.fetch_config().reuse
    assert (other.stats.reused_rows > 0) == (method.trigger is not None or reuse is not False)
    if method.trigger is None and not reuse:  # only captured steps keep rows unasked
        assert plain.stats.reused_rows == 0
    for number in range(3):  # and the pipeline can go on with it
        new = tokens(3000 + number, 2, 1)
        torch.testing.assert_close(decode_step(other, *new, None, params), decode_step(plain, *new, None, params))


@pytest.mark.parametrize("name", ["collisions", "balanced", "norms"])
def test_a_leaving_token_at_the_centre_and_one_of_zero_norm(name: str) -> None:
    """Encoded by `leave` as the reference encodes them: the one is average, the other behind everything.

    Without a rotary embedding: centres of spans are rounded otherwise by kernels, so no key lies exactly at them.
    """
    layer = state(replace(METHODS[name], local_tokens=2, update_interval=2), 1, statistics=usual(2, 2, DIM, turned=False))
    start(layer, [90])
    layers, joined = in_slots([layer], 64)
    assert isinstance(layer.index, SphereIndex)
    centre = layer.index.maps.centres(87, 1)
    keys = [torch.zeros(2, 1, DIM), torch.zeros(2, 1, DIM) if centre is None else centre]
    now, params = torch.ones(1, dtype=torch.int64), AttentionParams(DIM**-0.5)
    for number in range(6):  # until both have left the window
        queries, key, values = tokens(number, 1, 1)
        key = keys[number].unsqueeze(0) if number < 2 else key
        layers.prepare()
        layers.all[0].step(queries, key, values, now, params)
        layers.advance()
        now += 1
    layers.leave(joined)
    weights = layer.index.codes(0).weights[:, 86:88]
    assert layer.index.lengths[0] >= 88 and not weights[:, 0].any()
    assert weights[:, 1].all() == (centre is not None) and weights.abs().max() < 1e-30
    assert layer.index.zero_norms.all()


@pytest.mark.parametrize("name", ["collisions", "balanced"])
def test_a_step_in_branches_is_the_undivided_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four sequences and KV heads in three launches of unequal size, over sequences of unequal length."""
    asked: list[range] = []

    def told(parts: list[range], like: Tensor, work: Callable[[range], None]) -> None:
        asked.extend(parts)
        for part in reversed(parts):
            work(part)

    monkeypatch.setattr("kvrecall.index.sphere.step.stream_count", lambda pairs, tokens: 3)
    monkeypatch.setattr("kvrecall.index.sphere.step.on_streams", told)
    compare(METHODS[name], 2, AttentionParams(DIM**-0.5))
    assert asked == 2 * [range(0, 1), range(1, 2), range(2, 4)]


def test_the_stages_that_are_timed_alone_are_a_step() -> None:
    from benchmarks.gpu_layer import Bench

    layer = state(METHODS["balanced"], 2)
    start(layer, [90, 61])
    layers, _ = in_slots([layer], 16)
    layers.prepare()
    captured = layers.all[0]
    assert isinstance(captured, SearchSlots)
    bench = Bench.__new__(Bench)  # without its layers, which lie on a GPU
    bench.new, bench.params = list(tokens(7, 2, 1)), AttentionParams(DIM**-0.5)
    bench.now = torch.ones(1, dtype=torch.int64)
    expected = captured.step(*bench.new, bench.now, bench.params).clone()
    captured.forget_trial()
    *_, merged = [work(captured) for work in bench.stages().values()]
    assert isinstance(merged, Tensor) and torch.equal(merged, expected)


def same_codes(made: LayerState, expected: LayerState) -> None:
    mine, theirs = made.index, expected.index
    assert isinstance(mine, SphereIndex) and isinstance(theirs, SphereIndex)
    assert mine.lengths == theirs.lengths and mine.maps is theirs.maps
    assert torch.equal(mine.counts, theirs.counts)
    for b in range(2):
        ours, plain = mine.codes(b), theirs.codes(b)
        assert torch.equal(ours.signs, plain.signs) and torch.equal(ours.magnitudes, plain.magnitudes)
        torch.testing.assert_close(weight_values(ours.weights), weight_values(plain.weights), rtol=1e-5, atol=0)
        assert ours.norms is not None and plain.norms is not None and torch.equal(ours.norms, plain.norms)
        assert all(torch.equal(x, y) for x, y in zip(made.store.host[b].blocks(), expected.store.host[b].blocks(), strict=True))


@pytest.mark.parametrize(("name", "steps", "lengths"), [
    ("balanced", 10, (90, 76)), ("balanced-eight-bits", 12, (75, 140)), ("balanced-early", 9, (82, 80)),
    ("reused", 10, (78, 206)),
])  # fmt: skip
def test_centres_follow_the_tokens_that_leave(name: str, steps: int, lengths: tuple[int, int]) -> None:
    """Keys of a model that drift with their position, over the ends of spans, which a code must not cross too early or late."""
    params, model = AttentionParams(0.01 * DIM**-0.5), Model(1, 2, 2, DIM, Halves(DIM, base=50.0))  # products are large
    known = model.layer().statistics
    assert known is not None
    plain, other = compare(METHODS[name], steps, params, atol=1e-5, lengths=lengths, statistics=known, draw=drawn(model))
    assert other.shape.statistics is known and isinstance(other.index, SphereIndex)
    before = [n - 20 for n in lengths]
    assert any(n // 64 < end // 64 for n, end in zip(before, other.index.lengths, strict=True))
    same_codes(other, plain)
    for b, held in plain.held.items():
        assert torch.equal(other.held[b].ids, held.ids)
    keys = torch.cat(list(other.store.host[0].blocks()), 1)[:, :, 0]
    fresh = SphereIndex(replace(other.shape, sequences=1, zone_start=4), other.index.config)
    fresh.append(0, keys)
    assert fresh.maps is other.index.maps and torch.equal(fresh.codes(0).signs, other.index.codes(0).signs)
    for number in range(3):
        new = tokens(3000 + number, 2, 1)
        torch.testing.assert_close(decode_step(other, *new, None, params), decode_step(plain, *new, None, params))
    same_codes(other, plain)


def drawn(model: Model) -> Callable[[int, int, int, list[int]], tuple[Tensor, Tensor, Tensor]]:
    """As `tokens`, with keys and queries of a model at positions from `first` on."""

    def draw(seed: int, batch: int, count: int, first: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        queries = torch.stack([model.queries(seed + b, count, at) for b, at in enumerate(first)])
        keys = torch.stack([model.keys(seed + b, count, at) for b, at in enumerate(first)])
        return queries, keys, tokens(seed, batch, count)[2]

    return draw


def test_softcap_and_learned_sinks_reach_the_kernels() -> None:
    params = AttentionParams(DIM**-0.5, softcap=5.0, sink_logits=torch.tensor([0.3, -1.0, 2.0, 0.0]))
    compare(METHODS["products"], 2, params)


def test_a_key_that_is_not_finite_is_flagged() -> None:
    layer = state(METHODS["collisions"], 2)
    start(layer, [90, 61])
    layers, _ = in_slots([layer], 16)
    layers.prepare()
    queries, keys, values = tokens(7, 2, 1)
    values[1, 0, 0, 3] = float("inf")
    layers.all[0].step(queries, keys, values, torch.zeros(1, dtype=torch.int64), AttentionParams(0.1))
    assert layers.all[0].bad.tolist() == [0, 1]


@pytest.mark.parametrize("name", ["stride", "semantic-retrieval"])
def test_a_second_turn_goes_on_from_what_was_given_back(name: str) -> None:
    """More of a prompt between two captured stretches, as in a conversation."""
    params = AttentionParams(DIM**-0.5)
    plain, other = compare(METHODS[name], 2, params)
    chunk = tokens(70, 2, 13)
    torch.testing.assert_close(prefill_layer(other, *chunk, None, params), prefill_layer(plain, *chunk, None, params))
    layers, joined = in_slots([other], 64)
    now = torch.ones(1, dtype=torch.int64)
    for number in range(5):
        new = tokens(2000 + number, 2, 1)
        expected = decode_step(plain, *new, None, params)
        layers.prepare()
        out = layers.all[0].step(*new, now, params)
        layers.advance()
        now += 1
        torch.testing.assert_close(out, expected, atol=2e-6, rtol=2e-6)
    layers.leave(joined)
    assert other.stats.searches == plain.stats.searches


RESTS = {
    "balanced": kvrecall.methods.get("pariskv-balanced", estimate="page-means:page_tokens=4", **EXACT | {"update_interval": 3}),
    "collisions": kvrecall.ParisKV(
        estimate="page-means:page_tokens=3", fetch="direct:reuse=true", **EXACT | {"update_interval": 3}
    ),
    "many-pages": kvrecall.ParisKV(
        estimate="page-means:page_tokens=2", stage1="product", **EXACT | {"top_k": 70, "update_interval": 3}
    ),
}


@pytest.mark.parametrize(
    ("name", "softcap", "small"),
    [("balanced", 0.0, False), ("collisions", 20.0, False), ("many-pages", 0.0, False), ("balanced", 0.0, True)],
)
def test_page_means_stand_for_the_rest(name: str, softcap: float, small: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages become whole meanwhile and lose tokens to the selection; with few of them to a program it takes several blocks."""
    monkeypatch.setattr("kvrecall.index.page_means.kernels.pages_at_once", lambda *_: 16)
    monkeypatch.setattr("kvrecall.index.page_means._MOST_PARTS", 2)
    lengths = (190, 161) if name == "many-pages" else (90, 61)
    params = AttentionParams(DIM**-0.5, softcap)
    plain, other = compare(RESTS[name], 4, params, atol=4e-6, lengths=lengths, small=small)  # sums of more parts
    assert other.stats.estimated_units == plain.stats.estimated_units > 0
    for counter in ("steps", "searches", "attended_tokens", "retrieved_tokens"):
        assert getattr(other.stats, counter) == getattr(plain.stats, counter), counter
    for number in range(3):  # and the pipeline can go on with it
        new = tokens(3000 + number, 2, 1)
        torch.testing.assert_close(decode_step(other, *new, None, params), decode_step(plain, *new, None, params))
    for b in range(2):
        assert other.index.means.lengths[b] == plain.index.means.lengths[b] > 0
        assert torch.equal(other.index.means.gather(b), plain.index.means.gather(b))

"""A captured layer, launched step by step without a graph, does what the pipeline does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import kvrecall
from kvrecall.index.sphere import SphereIndex
from kvrecall.index.sphere.codes import weight_values
from kvrecall.layer_state import LayerState
from kvrecall.pipeline import decode_step, prefill_layer
from kvrecall.structs import AttentionParams
from tests.layers import DIM, ZONES, start, state, tokens

pytest.importorskip("triton", reason="Triton is only there on Linux")
from kvrecall.engine.captured.layer import CapturedLayer
from kvrecall.engine.captured.plan import StepPlan, pack


def borrowed(layer: LayerState, room: int) -> tuple[CapturedLayer, StepPlan]:
    """As the decoder does it."""
    method, b = layer.method, layer.store.sequences
    config = method.index_config()
    layer.end_prompts(list(range(b)), coming=1)
    assert isinstance(config, kvrecall.index.sphere.SphereConfig) and method.top_k is not None
    zones = [layer.store.zones(i) for i in range(b)]
    plan = StepPlan(method.zone_sizes(), config.steps, config.min_candidates_per_k, method.top_k, zones)
    return CapturedLayer(layer, plan, max(z.retrieval for z in zones) + room), plan


def compare(
    method: kvrecall.Method,
    steps: int,
    params: AttentionParams,
    warm: int = 6,
    atol: float = 2e-6,
    lengths: tuple[int, int] = (90, 61),
) -> tuple[LayerState, LayerState]:
    """Runs both from the same prompt; every output must agree; returns the states (pipeline's, captured)."""
    plain, other = state(method, 2), state(method, 2)
    start(plain, list(lengths)), start(other, list(lengths))
    for number in range(warm):
        new = tokens(500 + number, 2, 1)
        decode_step(plain, *new, None, params), decode_step(other, *new, None, params)
    captured, plan = borrowed(other, 64)
    parity = torch.zeros(1, dtype=torch.int64)
    for number in range(steps):
        new = tokens(1000 + number, 2, 1)
        expected = decode_step(plain, *new, None, params)
        captured.renew()
        rows = captured._plan_rows = pack(plan.rows())
        if captured.early:
            captured.search_early()
        out: Tensor = captured.decode(*new, rows, parity, params)
        plan.advance()
        captured.moved_on()
        parity.copy_(1 - parity)
        torch.testing.assert_close(out, expected, atol=atol, rtol=2e-6)
    captured.finish()
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
    "balanced-collisions": kvrecall.ParisKV(center=True, balance=True, gqa="max", trigger="fixed-stride:steps=2", **EXACT),
    "centred": kvrecall.ParisKV(center=True, stage1="product", fetch="direct:reuse=true", **EXACT),
    "semantic-retrieval": kvrecall.ParisKV(
        stage1="product", trigger="semantic-boundary:threshold=0.0,compare=retrieval,max_stride=3", **EXACT
    ),
}


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())
def test_steps_and_what_is_left_behind_are_the_pipelines(method: kvrecall.Method) -> None:
    params = AttentionParams(DIM**-0.5)
    plain, other = compare(method, 4, params)  # the buffer of 8 fills up in between
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
        assert torch.equal(other.index.maps.of_keys(b)[0], plain.index.maps.of_keys(b)[0])
        assert torch.equal(other.index._counts, plain.index._counts)
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


@pytest.mark.parametrize("name", ["collisions", "balanced", "centred"])
def test_a_leaving_token_at_the_centre_and_one_of_zero_norm(name: str) -> None:
    """Encoded by `leave` as the reference encodes them: the one is average, the other behind everything."""
    layer = state(replace(METHODS[name], local_tokens=2, update_interval=2), 1)
    start(layer, [90])
    captured, plan = borrowed(layer, 64)
    centres = layer.index.maps.centres
    keys = [torch.zeros(2, 1, DIM), torch.zeros(2, 1, DIM) if centres is None else centres[0].unsqueeze(1)]
    parity, params = torch.zeros(1, dtype=torch.int64), AttentionParams(DIM**-0.5)
    for number in range(6):  # until both have left the window
        queries, key, values = tokens(number, 1, 1)
        key = keys[number].unsqueeze(0) if number < 2 else key
        captured.decode(queries, key, values, pack(plan.rows()), parity, params)
        plan.advance()
        parity.copy_(1 - parity)
    captured.finish()
    weights = layer.index.codes(0).weights[:, 86:88]
    assert layer.index.lengths[0] >= 88 and not weights[:, 0].any()
    assert weights[:, 1].all() == (centres is not None) and weights.abs().max() < 1e-30
    assert layer.index._zero_norms.all()


@pytest.mark.parametrize("name", ["collisions", "balanced"])
def test_a_step_in_branches_is_the_undivided_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four sequences and KV heads in three launches of unequal size, over sequences of unequal length."""
    asked: list[range] = []

    def told(parts: list[range], like: Tensor, work: Callable[[range], None]) -> None:
        asked.extend(parts)
        for part in reversed(parts):
            work(part)

    monkeypatch.setattr("kvrecall.engine.captured.layer.branches", lambda pairs, tokens: 3)
    monkeypatch.setattr("kvrecall.engine.captured.layer.beside", told)
    compare(METHODS[name], 2, AttentionParams(DIM**-0.5))
    assert asked == 2 * [range(0, 1), range(1, 2), range(2, 4)]


def test_the_stages_that_are_timed_alone_are_a_step() -> None:
    from kvrecall.bench.gpu_layer import Bench

    layer = state(METHODS["balanced"], 2)
    start(layer, [90, 61])
    captured, plan = borrowed(layer, 16)
    bench = Bench.__new__(Bench)  # without its layers, which lie on a GPU
    bench.new, bench.params, bench.rows = list(tokens(7, 2, 1)), AttentionParams(DIM**-0.5), pack(plan.rows())
    bench.parity = torch.zeros(1, dtype=torch.int64)
    expected = captured.decode(*bench.new, bench.rows, bench.parity, bench.params).clone()
    captured.forget_trial()
    *_, merged = [work(captured) for work in bench.stages().values()]
    assert isinstance(merged, Tensor) and torch.equal(merged, expected)


REFIT: dict[str, Any] = EXACT | {"refit_growth": 1.15, "center": True, "balance": True}
REFITS = {
    "products": kvrecall.methods.get("pariskv-balanced", **REFIT),
    "collisions": kvrecall.ParisKV(gqa="max", **REFIT),
    "early": kvrecall.methods.get("pariskv-balanced", trigger="speculative:threshold=0.0", **REFIT),
    "centre": kvrecall.ParisKV(stage1="product", fetch="direct:reuse=true", **REFIT | {"balance": False}),
}


def same_codes(made: LayerState, expected: LayerState) -> None:
    mine, theirs = made.index, expected.index
    assert isinstance(mine, SphereIndex) and isinstance(theirs, SphereIndex)
    assert mine.lengths == theirs.lengths and mine._waiting == theirs._waiting
    assert mine.maps.tokens == theirs.maps.tokens and mine.maps.fitted == theirs.maps.fitted
    assert torch.equal(mine._counts, theirs._counts)
    assert torch.equal(mine.maps.keys, theirs.maps.keys) and torch.equal(mine.maps.queries, theirs.maps.queries)
    for b in range(2):
        assert torch.equal(mine.codes(b).signs, theirs.codes(b).signs)
        assert torch.equal(mine.codes(b).magnitudes, theirs.codes(b).magnitudes)
        assert all(torch.equal(x, y) for x, y in zip(made.store.host[b].blocks(), expected.store.host[b].blocks(), strict=True))


@pytest.mark.parametrize("steps", [1, 2], ids=["waiting", "coded"])
@pytest.mark.parametrize("name", REFITS)
def test_a_sequence_that_outgrows_its_maps_is_coded_anew_as_uncaptured(name: str, steps: int) -> None:
    """The shorter one, whose zone goes from 41 to 49 tokens with the first captured step. If that is the last one, it waits."""
    params = AttentionParams(DIM**-0.5)
    plain, other = compare(REFITS[name], steps, params, warm=7)
    assert isinstance(other.index, SphereIndex) and other.index.maps.tokens == [70, 41 if steps == 1 else 49]
    assert other.index._waiting == [0, 49 if steps == 1 else 0]
    same_codes(other, plain)
    new = tokens(3000, 2, 1)
    torch.testing.assert_close(decode_step(other, *new, None, params), decode_step(plain, *new, None, params))
    assert other.index.maps.tokens == [70, 49]
    same_codes(other, plain)


@pytest.mark.parametrize(("name", "where"), [
    ("products", "fit"), ("products", "append_codes"), ("collisions", "_encode_buffer"), ("products", "given up"),
])  # fmt: skip
def test_coding_anew_comes_later_or_again(name: str, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer's turn comes a step later than its work is due, with a token in the buffer then; coding fails; it is made again,
    or left to the next search if the steps end there."""
    params, parity = AttentionParams(DIM**-0.5), torch.zeros(1, dtype=torch.int64)
    plain, other = state(REFITS[name], 2), state(REFITS[name], 2)
    for layer in (plain, other):
        start(layer, [90, 61])
        for number in range(7):
            decode_step(layer, *tokens(500 + number, 2, 1), None, params)
    captured, plan = borrowed(other, 64)
    for number in range(2):
        new = tokens(1000 + number, 2, 1)
        decode_step(plain, *new, None, params)
        captured.decode(*new, pack(plan.rows()), parity, params)
        plan.advance()
        parity.copy_(1 - parity)
    owner: Any = {"fit": captured._index.maps, "_encode_buffer": captured}.get(where, captured._index)
    with monkeypatch.context() as patch:
        patch.setattr(owner, "append_codes" if where == "given up" else where, raising(MemoryError))
        with pytest.raises(MemoryError):
            captured.renew()
    if where != "given up":
        assert captured.renew() and not captured.renew()
    assert captured._index.maps.tokens == [70, 41 if where == "given up" else 49] and plan.zones[1].buffer == 1
    captured.finish()
    if where == "given up":
        assert captured._index._waiting == [0, 49]
        captured._index.settle(1)
    same_codes(other, plain)


def test_a_long_zone_is_coded_anew_before_several_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The old codes are searched until the new ones are whole; then those are what one pass over all would have made."""
    monkeypatch.setattr("kvrecall.engine.captured.layer._RENEWED_TOKENS", 12)
    params, parity = AttentionParams(DIM**-0.5), torch.zeros(1, dtype=torch.int64)
    kept, other = state(replace(REFITS["products"], refit_growth=None), 2), state(REFITS["products"], 2)
    for layer in (kept, other):
        start(layer, [90, 61])
        for number in range(7):
            decode_step(layer, *tokens(500 + number, 2, 1), None, params)
    captured, plan = borrowed(other, 64)
    maps, renewed = captured._index.maps, []
    for number in range(12):
        new = tokens(1000 + number, 2, 1)
        before = decode_step(kept, *new, None, params)
        renewed.append(captured.renew())
        if maps.tokens == [70, 49]:
            break
        torch.testing.assert_close(captured.decode(*new, pack(plan.rows()), parity, params), before, atol=2e-6, rtol=2e-6)
        plan.advance()
        parity.copy_(1 - parity)
    assert renewed == [False, *[True] * 9]  # 49 tokens for the maps, and then for the codes 57, as many as there are by then
    zone = plan.zones[1].retrieval
    with captured._stored(1, zone):
        keys = torch.cat(list(other.store.host[1].blocks()), 1)[:, :, 0]
    fresh = captured._index.select([1])
    fresh.forget_codes(0, 0)
    fresh.maps.watch(0, keys[:, :49], 0)
    fresh.maps.fit(0, 49, ())
    fresh.append_codes(0, keys)
    assert zone == 57 and torch.equal(fresh.codes(0).signs, captured._index.codes(1).signs)
    torch.testing.assert_close(fresh.maps.keys[0], maps.keys[1])
    assert (
        captured._outgrown == {0} and captured._renewal is not None
    )  # what was left of the step's share went to the other one
    buffer = captured._buffer(1)[:, :, 0]
    fresh.append_codes(0, buffer)
    ahead = captured._index._signs.rows[1, :, zone : zone + buffer.shape[1]]
    assert torch.equal(fresh.codes(0).signs[:, zone:], ahead) and torch.equal(captured._live[1], fresh._counts[0])
    captured.finish()
    decode_step(other, *tokens(2000, 2, 1), None, params)
    assert maps.tokens == [plan.zones[0].retrieval, 57]  # more than 1.15 times as many as the maps knew


def raising(error: type[Exception]) -> Callable[..., None]:
    def fails(*_: object) -> None:
        raise error

    return fails


def test_softcap_and_learned_sinks_reach_the_kernels() -> None:
    params = AttentionParams(DIM**-0.5, softcap=5.0, sink_logits=torch.tensor([0.3, -1.0, 2.0, 0.0]))
    compare(METHODS["products"], 2, params)


def test_a_key_that_is_not_finite_is_flagged() -> None:
    layer = state(METHODS["collisions"], 2)
    start(layer, [90, 61])
    captured, plan = borrowed(layer, 16)
    queries, keys, values = tokens(7, 2, 1)
    values[1, 0, 0, 3] = float("inf")
    captured.decode(queries, keys, values, pack(plan.rows()), torch.zeros(1, dtype=torch.int64), AttentionParams(0.1))
    assert captured.bad.tolist() == [0, 1]


@pytest.mark.parametrize("name", ["stride", "semantic-retrieval"])
def test_a_second_turn_goes_on_from_what_was_given_back(name: str) -> None:
    """More of a prompt between two captured stretches, as in a conversation."""
    params = AttentionParams(DIM**-0.5)
    plain, other = compare(METHODS[name], 2, params)
    chunk = tokens(70, 2, 13)
    torch.testing.assert_close(prefill_layer(other, *chunk, None, params), prefill_layer(plain, *chunk, None, params))
    captured, plan = borrowed(other, 64)
    parity = torch.zeros(1, dtype=torch.int64)
    for number in range(5):
        new = tokens(2000 + number, 2, 1)
        expected = decode_step(plain, *new, None, params)
        out = captured.decode(*new, pack(plan.rows()), parity, params)
        plan.advance()
        parity.copy_(1 - parity)
        torch.testing.assert_close(out, expected, atol=2e-6, rtol=2e-6)
    captured.finish()
    assert other.stats.searches == plain.stats.searches


RESTS = {
    "balanced": kvrecall.methods.get("pariskv-balanced", rest="page-means:page_tokens=4", **EXACT | {"update_interval": 3}),
    "collisions": kvrecall.ParisKV(
        rest="page-means:page_tokens=3", fetch="direct:reuse=true", **EXACT | {"update_interval": 3}
    ),
    "many-pages": kvrecall.ParisKV(
        rest="page-means:page_tokens=2", stage1="product", **EXACT | {"top_k": 70, "update_interval": 3}
    ),
}


@pytest.mark.parametrize(("name", "softcap"), [("balanced", 0.0), ("collisions", 20.0), ("many-pages", 0.0)])
def test_page_means_stand_for_the_rest(name: str, softcap: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages become whole meanwhile and lose tokens to the selection; with few of them to a program it takes several blocks."""
    monkeypatch.setattr("kvrecall.engine.captured.rest._PAGES", 16)
    monkeypatch.setattr("kvrecall.engine.captured.rest._MOST_PARTS", 2)
    lengths = (190, 161) if name == "many-pages" else (90, 61)
    params = AttentionParams(DIM**-0.5, softcap)
    plain, other = compare(RESTS[name], 4, params, atol=4e-6, lengths=lengths)  # sums of more parts
    assert other.stats.estimated_units == plain.stats.estimated_units > 0
    for counter in ("steps", "searches", "attended_tokens", "retrieved_tokens"):
        assert getattr(other.stats, counter) == getattr(plain.stats, counter), counter
    for number in range(3):  # and the pipeline can go on with it
        new = tokens(3000 + number, 2, 1)
        torch.testing.assert_close(decode_step(other, *new, None, params), decode_step(plain, *new, None, params))
    for b in range(2):
        assert other.index.means.lengths[b] == plain.index.means.lengths[b] > 0
        assert torch.equal(other.index.means.view(b), plain.index.means.view(b))

"""Whole caches whose layers that search nothing have their rows on the device: answers, operations, demands for memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache

import kvrecall
from kvrecall import engine
from kvrecall.backends.transformers.cache_name import cache_argument
from kvrecall.core import errors
from tests.backends.models import tiny
from tests.backends.test_cache_operations import OPERATIONS, after_operation
from tests.backends.test_transformers import ZONES, prompt, ragged, run
from tests.blocks import Device, small_blocks

FULL = kvrecall.Full(**ZONES)
MIXED = kvrecall.ParisKV(top_k=10_000, dense_layers=(0,), **ZONES)
METHODS = {"full": FULL, "one-dense-layer": MIXED}
each = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    small_blocks(monkeypatch)
    return Device(monkeypatch)


def near(cache: kvrecall.RetrievalCache) -> list[bool]:
    """Of each layer, whether its rows are on the device."""
    return [layer.state.store.on_device for layer in cache.retrieval_layers if layer.state is not None]


def cache_of(model: Any, method: kvrecall.Method = FULL, **options: Any) -> kvrecall.RetrievalCache:
    return kvrecall.RetrievalCache(model.config, method, **options)


@each
@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
@torch.no_grad()
def test_batch_operations(method: kvrecall.Method, operation: tuple[str, Any]) -> None:
    model, inputs = tiny("llama"), ragged()
    expected = after_operation(model, DynamicCache(config=model.config), inputs, operation)
    cache = cache_of(model, method)
    with kvrecall.attach(model):
        ours = after_operation(model, cache, inputs, operation)
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)
    assert near(cache) == [not method.searches(layer.number) for layer in cache.retrieval_layers]


@each
def test_beams_and_rolled_back_tokens(method: kvrecall.Method) -> None:
    model = tiny("llama")
    inputs = {name: x.repeat(1, 3) for name, x in prompt(1, 20).items()}
    for options in ({"num_beams": 3}, {"prompt_lookup_num_tokens": 4}):
        expected = run(model, DynamicCache(config=model.config), inputs, **options)
        with kvrecall.attach(model):
            assert torch.equal(run(model, cache_of(model, method), inputs, **options), expected)


@each
@pytest.mark.parametrize(("announced", "refusing"), [(False, n) for n in (1, 2, 5, 8, 13)] + [(True, n) for n in (1, 2, 4)])
def test_a_device_that_refuses_in_the_middle_of_a_prompt(
    method: kvrecall.Method, announced: bool, refusing: int, device: Device
) -> None:
    model, ids = tiny("llama"), prompt(2, 150)["input_ids"]
    expected = engine.generate(model, None, ids, cache_of(model, rows_on_device=False), max_new_tokens=12)
    cache = cache_of(model, method)
    device.demands, device.refusing = 0, refusing
    if announced:
        engine.prefill(model, ids[:, :-1], cache, chunk_tokens=32, expect_tokens=400)
    else:
        with kvrecall.attach(model), torch.no_grad():
            for chunk in ids[:, :-1].split(32, 1):
                model(chunk, **cache_argument(cache))
    made = engine.generate(model, None, ids, cache, max_new_tokens=12, chunk_tokens=32)
    assert made.new_tokens == expected.new_tokens
    assert all(near(cache)[: 3 if method is FULL else 1]) == (device.demands < refusing)
    assert device.demands >= min(refusing, 2)


@each
def test_forks_go_their_own_ways(method: kvrecall.Method) -> None:
    model, inputs = tiny("llama"), prompt(1)
    base = cache_of(model, method)
    turns = [{name: torch.cat([x, x[:, i : i + 9]], 1) for name, x in inputs.items()} for i in (0, 30, 50)]
    expected = [run(model, DynamicCache(config=model.config), turn) for turn in turns]
    with kvrecall.attach(model), torch.no_grad():
        model(**inputs, **cache_argument(base))
        forks = [base.fork(), base.fork(kvrecall.ParisKV(top_k=10_000, **ZONES)), base.fork(FULL)]
        for fork, turn, answer in zip(forks, turns, expected, strict=True):
            assert torch.equal(run(model, fork, turn), answer)
    layers = len(base.retrieval_layers)
    assert [sum(near(fork)) for fork in forks] == [sum(near(base)), 0, layers]


def test_rows_stay_on_the_host_where_that_is_asked_for() -> None:
    model, ids = tiny("llama"), prompt(1, 60)["input_ids"]
    cache = cache_of(model, rows_on_device=False)
    engine.prefill(model, ids, cache)
    assert not any(near(cache)) and not any(near(cache.fork())) and all(near(cache.fork(MIXED))[:1])
    other = cache_of(model)
    engine.prefill(model, ids, other)
    assert all(near(other)) and not any(near(other.fork(kvrecall.Full(), rows_on_device=False)))
    fork = other.fork(rows_on_device=False)
    assert all(near(other)) and not any(near(fork)) and not any(near(fork.fork()))
    answers = [engine.generate(model, None, ids, each, max_new_tokens=12).new_tokens for each in (cache, other, fork)]
    assert answers[0] == answers[1] == answers[2]
    with pytest.raises(errors.ParameterError, match="rows_on_device: expected None or False"):
        cache_of(model, rows_on_device=True)


def test_what_is_announced_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of all layers, windows and summaries of those behind them."""
    model, ids = tiny("llama"), prompt(1, 60)["input_ids"]
    row = 2 * 2 * 64 * 4
    sizes = FULL.zone_sizes()
    zone = row * (1000 - sizes.sink_tokens - sizes.local_tokens)
    layers = len(cache_of(model).retrieval_layers)
    need = zone + (layers - 1) * row * sizes.resident_capacity  # of the first layer, and the windows behind it
    for room, fits in ((need, True), (need - 1, False)):
        monkeypatch.setattr("kvrecall.backends.transformers.layer.room_for_rows", lambda _, room=room: room)
        cache = cache_of(model)
        engine.prefill(model, ids, cache, expect_tokens=1000)
        assert near(cache)[0] == fits


def test_a_cache_is_not_refused_for_host_memory_that_it_does_not_use(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = tiny("llama"), prompt(1, 300)["input_ids"]
    module = "kvrecall.backends.transformers.cache"
    monkeypatch.setattr(f"{module}.available_host_bytes", lambda: 1000)
    cache = cache_of(model)
    cache._device = lambda: torch.device("cpu")  # which counts as one with memory of its own
    cache.reserve(2000)
    engine.prefill(model, ids, cache, expect_tokens=2000)
    assert all(near(cache))
    cache.reserve(3000)
    cache.fork(kvrecall.Full(**ZONES | {"sink_tokens": 9}))
    with pytest.raises(errors.HostMemoryError):
        cache.fork(kvrecall.ParisKV(**ZONES | {"sink_tokens": 9}))
    for options in ({"rows_on_device": False}, {"method": kvrecall.ParisKV(**ZONES)}, {"method": MIXED}):
        with pytest.raises(errors.HostMemoryError):
            cache_of(model, **options).reserve(2000)
    monkeypatch.setattr(f"{module}.room_for_rows", lambda _: 1000)  # neither has room
    with pytest.raises(errors.HostMemoryError):
        cache_of(model).reserve(2000)


def test_layers_that_have_room_and_layers_that_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host is asked for what the others need."""
    model = tiny("llama")
    layers, each = len(cache_of(model).retrieval_layers), 2 * 2 * 64 * 2 * 2000
    module = "kvrecall.backends.transformers.cache"
    monkeypatch.setattr(f"{module}.room_for_rows", lambda _: each * (layers - 1))
    for free, fits in ((each, True), (each - 1, False)):
        monkeypatch.setattr(f"{module}.available_host_bytes", lambda free=free: free)
        if fits:
            cache_of(model).reserve(2000)
        else:
            with pytest.raises(errors.HostMemoryError):
                cache_of(model).reserve(2000)

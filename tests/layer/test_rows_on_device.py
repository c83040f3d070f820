"""Layers whose rows lie on the device do what layers with rows on the host do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import kvrecall
from kvrecall.backends.transformers.layer import rezoned
from kvrecall.core.structs import AttentionParams
from kvrecall.layer.history import all_of_it
from kvrecall.layer.pipeline import decode_step, prefill_layer
from kvrecall.layer.state import LayerState
from tests.blocks import Device, small_blocks
from tests.layer.test_state import assert_holds, assert_same_answers
from tests.layers import DIM, PARAMS, ZONES, History, methods, start, state, step, tokens

FULL = kvrecall.Full(**ZONES)
OTHERS = {name: methods(5)[name] for name in ("pariskv-mean_q", "exact-max", "prkv", "ctkvr", "louiskv")}
OTHER_ZONES: dict[str, Any] = {"sink_tokens": 3, "local_tokens": 9, "update_interval": 8}


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    small_blocks(monkeypatch)
    return Device(monkeypatch)


def pair(sequences: int = 2, lengths: tuple[int, ...] = (90, 57)) -> tuple[LayerState, LayerState, History]:
    """The same prompt in a layer with rows on the device and in one with rows on the host."""
    near, far = state(FULL, sequences), state(FULL, sequences)
    far.store.place(False)
    history = start(near, list(lengths))
    start(far, list(lengths))
    assert near.store.on_device and not far.store.on_device
    return near, far, history


@pytest.mark.parametrize(
    "params", [PARAMS, AttentionParams(0.3, 5.0), AttentionParams(0.1, sink_logits=torch.arange(4.0))],
    ids=["plain", "softcap", "sinks"],
)  # fmt: skip
def test_chunks_and_steps(params: AttentionParams) -> None:
    layers = pair()[:2]
    for number in range(40):
        inputs = tokens(number, 2, 17 if number in (7, 23) else 1)
        flags = None if number % 5 else [True, False]
        if number in (7, 23):
            valid = torch.ones(2, 17, dtype=torch.bool)
            valid[1, :6] = False
            outs = [prefill_layer(layer, *inputs, valid, params) for layer in layers]
        else:
            outs = [decode_step(layer, *inputs, flags, params) for layer in layers]
        torch.testing.assert_close(outs[0], outs[1], atol=1e-5, rtol=1e-5)
    near, far = layers
    assert near.store.on_device and [near.store.zones(b) for b in (0, 1)] == [far.store.zones(b) for b in (0, 1)]
    for name in ("steps", "attended_tokens", "attended_rows", "searches"):
        assert getattr(near.stats, name) == getattr(far.stats, name)


def test_a_zone_that_is_empty_beside_one_that_is_not() -> None:
    near, far, history = pair(2, (60, 9))
    for number in range(30):
        queries, keys, values = tokens(number, 2, 1)
        history.add(keys, values)
        outs = [decode_step(layer, queries, keys, values, None, PARAMS) for layer in (near, far)]
        torch.testing.assert_close(outs[0], outs[1], atol=1e-5, rtol=1e-5)
    assert_holds(near, history)


def test_no_step_reads_a_row_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """One attention for all sequences; the table and lengths are sent only when a zone has grown."""
    near, _, history = pair()
    calls: list[tuple[Any, ...]] = []
    reference = kvrecall.layer.pipeline.attend_zones

    def watched(queries: torch.Tensor, table: Any, lengths: torch.Tensor, *how: Any) -> Any:
        calls.append((table.blocks, lengths))
        return reference(queries, table, lengths, *how)

    monkeypatch.setattr("kvrecall.layer.pipeline.attend_zones", watched)
    monkeypatch.setattr("kvrecall.layer.pipeline._attend_zone", None)
    monkeypatch.setattr("kvrecall.layer.pipeline.rows_to_device", None)
    for number in range(24):
        step(near, history, number)
    assert len(calls) == 24
    assert len({id(lengths) for _, lengths in calls}) == 3  # at first, and after every eighth token but the last


@pytest.mark.parametrize(("what", "refusing"), [("chunk", n) for n in range(1, 9)] + [("steps", n) for n in range(1, 5)])
def test_a_device_that_refuses_in_the_middle(what: str, refusing: int, device: Device) -> None:
    """The answers are those of the host; so is what the layer holds."""
    near, far, _ = pair()
    device.demands, device.refusing = 0, refusing
    for number in range(40):
        inputs = tokens(number, 2, 23 if what == "chunk" else 1)
        work = (lambda layer, *x: prefill_layer(layer, *x)) if what == "chunk" else decode_step
        outs = [work(layer, *inputs, None, PARAMS) for layer in (near, far)]
        torch.testing.assert_close(outs[0], outs[1], atol=1e-5, rtol=1e-5)
        for b in range(2):
            assert torch.equal(*(torch.cat(list(layer.store.blocks(b)), 1) for layer in (near, far)))
        if not near.store.on_device and number > 10:
            break
    assert not near.store.on_device


@pytest.mark.parametrize("name", OTHERS)
def test_forks_to_methods_that_search_and_back(name: str) -> None:
    """Each has its rows where its method reads them; nobody notices the others."""
    near, far, history = pair()
    searching, plain = near.fork(OTHERS[name]), far.fork(OTHERS[name])
    assert near.store.on_device and not searching.store.on_device
    assert_same_answers(searching, plain)
    back = searching.fork(replace(FULL, full_attention_threshold=1))
    again = plain.fork(replace(FULL, full_attention_threshold=1), rows_on_device=False)
    assert back.store.on_device and not again.store.on_device
    assert_same_answers(back, again)
    for number in range(12):
        step(near, history, number)
    assert_holds(near, history)


@pytest.mark.parametrize("name", OTHERS)
def test_rezoned_forks_to_methods_that_search_and_back(name: str) -> None:
    near, far, history = pair()
    searching, plain = (rezoned(layer, replace(OTHERS[name], **OTHER_ZONES)) for layer in (near, far))
    assert not searching.store.on_device
    assert_same_answers(searching, plain)
    back, again = rezoned(searching, FULL), rezoned(plain, FULL, rows_on_device=False)
    assert back.store.on_device and not again.store.on_device
    assert_same_answers(back, again)
    assert_holds(near, history)


def test_an_error_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    near, _, history = pair()
    for work in (lambda: start(near, [40, 40]), lambda: near.crop(0, 30), lambda: step(near, History(2), 5)):
        with pytest.raises(KeyboardInterrupt), all_of_it(near):
            work()
            raise KeyboardInterrupt
        assert_holds(near, history)
    for number in range(9):
        step(near, history, number)
    assert_holds(near, history)


def test_only_layers_that_search_nothing_have_their_rows_on_the_device() -> None:
    method = kvrecall.LouisKV(top_k=5, dense_layers=(0,), cluster_tokens=4, stretch_tokens=32, max_segment_tokens=8, **ZONES)
    assert [state(method, 1, layer=number).store.on_device for number in range(3)] == [True, False, False]
    assert not state(kvrecall.methods.Streaming(sink_tokens=4, local_tokens=16, update_interval=8), 1).store.on_device


def test_reports_tell_where_rows_lie() -> None:
    from kvrecall.layer.stats import CacheStats

    near, far, _ = pair()
    reports = [CacheStats.collect(FULL, [layer]).total for layer in (near, far)]
    rows = sum(layer.length for layer in near.store.host) * 2 * 2 * DIM * 4
    assert (reports[0].host_bytes, reports[1].host_bytes) == (0, rows)
    assert reports[0].device_bytes == reports[1].device_bytes + rows

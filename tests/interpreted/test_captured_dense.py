"""Captured steps of layers that search nothing, launched one by one: they leave what uncaptured ones do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import kvrecall
from kvrecall import engine
from kvrecall.backends.transformers.cache_name import cache_argument
from kvrecall.core.errors import CaptureError
from tests.backends.models import tiny
from tests.blocks import Device

pytest.importorskip("triton", reason="Triton is only there on Linux")
from kvrecall.backends.transformers.capture.calls import captured_decoding
from kvrecall.backends.transformers.capture.runner import CapturedSteps
from tests.interpreted.launched import without_gpu

SMALL: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2}
ZONES: dict[str, Any] = {"sink_tokens": 4, "local_tokens": 8, "update_interval": 4}
FULL = kvrecall.Full(**ZONES)
LOUISKV = kvrecall.LouisKV(
    top_k=6, dense_layers=(1,), threshold=-1.0, max_stride=3, cluster_tokens=4, stretch_tokens=32, max_segment_tokens=4,
    full_attention_threshold=0, **ZONES,
)  # fmt: skip


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch, several_blocks: None) -> Device:
    without_gpu(monkeypatch)
    monkeypatch.setattr("kvrecall.layer.slots.dense.has_own_memory", lambda _: True)
    return Device(monkeypatch)


def ids(tokens: int, sequences: int = 2) -> Tensor:
    return torch.randint(5, 90, (sequences, tokens), generator=torch.Generator().manual_seed(4))


def prefilled(model: Any, tokens: int, method: kvrecall.Method = FULL, ragged: bool = False) -> kvrecall.RetrievalCache:
    cache, prompt = kvrecall.RetrievalCache(model.config, method), ids(tokens)
    mask = torch.ones_like(prompt)
    mask[1, : 15 if ragged else 0] = 0
    engine.prefill(model, prompt, cache, attention_mask=mask)
    return cache


def steps(
    model: Any,
    cache: kvrecall.RetrievalCache,
    count: int,
    captured: CapturedSteps | None = None,
    start: int = 0,
    room: int = 20,
) -> Tensor:
    """Logits of so many single tokens, the same for every caller."""
    made = []
    for number in range(start, start + count):
        tokens = torch.tensor([[7 + number % 50], [9 + number % 60]])
        if captured is not None:
            logits = captured.step(tokens, room)
            assert logits is not None
            made.append(logits.clone())
            continue
        with kvrecall.attach(model), torch.no_grad():
            length = cache.get_seq_length()
            mask = cache.valid
            mask = torch.ones(2, length, dtype=torch.bool) if mask is None else mask
            mask = torch.cat([mask, torch.ones(2, 1, dtype=torch.bool)], 1).long()
            positions = mask.sum(1, keepdim=True) - 1
            out = model(tokens, attention_mask=mask, position_ids=positions, **cache_argument(cache))
        made.append(out.logits[:, -1])
    return torch.stack(made)


def same(made: kvrecall.RetrievalCache, wanted: kvrecall.RetrievalCache) -> None:
    assert made.get_seq_length() == wanted.get_seq_length()
    for ours, theirs in zip(made.retrieval_layers, wanted.retrieval_layers, strict=True):
        assert ours.state is not None and theirs.state is not None and ours.captured is None
        for b in range(2):
            assert ours.state.store.zones(b) == theirs.state.store.zones(b)
            rows = [torch.cat(list(layer.state.store.blocks(b)), 1) for layer in (ours, theirs)]
            torch.testing.assert_close(*rows, atol=1e-5, rtol=1e-5)
    for name in ("steps", "searches", "attended_tokens", "attended_rows"):
        assert len({getattr(cache.stats().total.counters, name) for cache in (made, wanted)}) == 1, name


def close(made: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(made, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("tokens", "ragged", "room"), [(40, True, 30), (40, False, 4), (2, False, 30), (12, False, 3)],
    ids=["ragged", "captured-anew", "within-the-sink", "without-a-zone"],
)  # fmt: skip
def test_full_attention(tokens: int, ragged: bool, room: int) -> None:
    model = tiny("llama", **SMALL)
    made, wanted = (prefilled(model, tokens, ragged=ragged) for _ in range(2))
    captured = CapturedSteps(model, made, required=True)
    close(steps(model, made, 9, captured, room=room), steps(model, wanted, 9))
    captured.close()
    same(made, wanted)
    close(steps(model, made, 5, start=9), steps(model, wanted, 5, start=9))  # and goes on uncaptured, and captured again
    close(steps(model, made, 3, captured, 14, room), steps(model, wanted, 3, start=14))
    captured.close()
    same(made, wanted)
    assert all(layer.state.store.on_device for layer in made.retrieval_layers)
    assert made.stats().total.counters.bytes_to_host == made.stats().total.counters.bytes_to_device == 0


@pytest.mark.parametrize("method", [FULL, LOUISKV], ids=lambda method: method.name)
def test_forks_and_captured_steps_do_not_meet(method: kvrecall.Method) -> None:
    """A block that is filled partly belongs to both; the one that is captured writes to a copy, in all layers."""
    model = tiny("llama", **SMALL)
    first, plain = (prefilled(model, 41, method) for _ in range(2))
    other, plain_other = first.fork(), plain.fork()
    captured = CapturedSteps(model, first, required=True)
    close(steps(model, other, 6, start=30), steps(model, plain_other, 6, start=30))
    close(steps(model, first, 9, captured), steps(model, plain, 9))
    close(steps(model, other, 6, start=36), steps(model, plain_other, 6, start=36))
    captured.close()
    same(first, plain)
    same(other, plain_other)


def test_rows_that_move_to_the_host_while_steps_are_captured(device: Device) -> None:
    """A fork finds no room; the graph goes on in the memory it knows, and what it stored is in the other one afterwards."""
    model = tiny("llama", **SMALL)
    first, plain = (prefilled(model, 41) for _ in range(2))
    other, plain_other = first.fork(), plain.fork()
    captured = CapturedSteps(model, first, required=True)
    close(steps(model, first, 5, captured), steps(model, plain, 5))
    device.demands, device.refusing = 0, 1
    close(steps(model, other, 40, start=30), steps(model, plain_other, 40, start=30))
    assert not any(layer.state.store.on_device for layer in other.retrieval_layers)
    close(steps(model, first, 9, captured, 5), steps(model, plain, 9, start=5))
    captured.close()
    same(first, plain)
    same(other, plain_other)
    close(steps(model, first, 9, start=14), steps(model, plain, 9, start=14))
    with pytest.raises(CaptureError, match="layer 0 searches nothing and its keys and values are in host memory"):
        CapturedSteps(model, first, required=True).step(ids(1), 20)
    same(first, plain)


def test_no_room_for_what_is_to_come_is_refused_and_the_cache_goes_on_uncaptured(device: Device) -> None:
    model, prompt = tiny("llama", **SMALL), ids(42)
    made, wanted = (prefilled(model, 41) for _ in range(2))
    expected = engine.generate(model, None, prompt, wanted, max_new_tokens=4).new_tokens
    device.demands, device.refusing = 0, 1
    with captured_decoding(model, made, 400, required=False):
        assert engine.generate(model, None, prompt, made, max_new_tokens=4).new_tokens == expected
    same(made, wanted)
    assert not made.retrieval_layers[0].state.store.on_device


def test_generated_tokens() -> None:
    model, prompt = tiny("llama", **SMALL), ids(40)
    caches = [kvrecall.RetrievalCache(model.config, FULL) for _ in range(2)]
    expected = engine.generate(model, None, prompt, caches[0], max_new_tokens=12).new_tokens
    with captured_decoding(model, caches[1], 5, required=True):
        assert engine.generate(model, None, prompt, caches[1], max_new_tokens=12).new_tokens == expected
    same(caches[1], caches[0])

"""The check before a benchmark: a captured step agrees with an uncaptured one, and the cache has forgotten the latter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import kvrecall
from kvrecall import engine
from kvrecall.bench import first_step
from kvrecall.bench.first_step import TOLERANCE, agree, uncaptured_step
from tests.integrations.models import tiny

pytest.importorskip("triton", reason="Triton is only there on Linux")
from kvrecall.engine.captured import decoder as captured

ZONES: dict[str, Any] = {"sink_tokens": 4, "local_tokens": 16, "update_interval": 8, "top_k": 6, "full_attention_threshold": 0}
EARLY = "speculative:threshold=0.0"
SMALL: dict[str, Any] = {"cluster_tokens": 4, "stretch_tokens": 32, "max_segment_tokens": 8}
METHODS = {
    "pariskv": kvrecall.ParisKV(stage1="product", weight_dtype="float32", **ZONES),
    "early": kvrecall.ParisKV(stage1="product", trigger=EARLY, weight_dtype="float32", **ZONES),
    "balanced": kvrecall.methods.get("pariskv-balanced", **ZONES),
    "prkv": kvrecall.PRKV(page_tokens=2, window_tokens=8, refresh_interval=5, **ZONES),
    "louiskv": kvrecall.LouisKV(dense_layers=(0,), threshold=-1.0, max_stride=3, **SMALL, **ZONES),
    "freekv": kvrecall.methods.FreeKV(**ZONES),
}
LENGTH = 60


class OnCpu(captured.CapturedDecoder):
    """Launches in place of replays."""

    def _capture(self) -> None:
        self._branch = None
        self._layers.prepare(trial=True)
        with kvrecall.attach(self._model), torch.no_grad():
            self._forward()
        for layer in self._layers.all:
            layer.forget_trial()
        self._graph: Any = self

    def replay(self) -> None:
        with kvrecall.attach(self._model), torch.no_grad():
            self._logits = self._forward()
        self._positions += 1
        self._parity.copy_(1 - self._parity)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured, "check_capture", lambda *_: None)
    monkeypatch.setattr(first_step, "let_go", lambda: None)


def prefilled(method: kvrecall.Method) -> tuple[Any, kvrecall.RetrievalCache, Tensor]:
    """A model of two layers with one KV head, which the interpreter is fast enough for, a cache of two prompts, and a token."""
    model = tiny("llama", num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1)
    prompt = torch.randint(5, 90, (2, LENGTH), generator=torch.Generator().manual_seed(4))
    cache = kvrecall.RetrievalCache(model.config, method)
    engine.prefill(model, prompt, cache)
    return model, cache, torch.full((2, 1), 17)


def captured_step(model: Any, cache: kvrecall.RetrievalCache, ids: Tensor) -> Tensor:
    decoder = OnCpu(model, cache, 16)
    decoder.input_ids.copy_(ids)
    return decoder.step().clone()


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())
def test_an_uncaptured_step_leaves_nothing_behind(method: kvrecall.Method) -> None:
    model, cache, ids = prefilled(method)
    first = uncaptured_step(model, cache, ids)
    assert cache.get_seq_length() == LENGTH and not cache.stats().total.counters.steps
    states = [layer.state for layer in cache.retrieval_layers if layer.state is not None]
    seen = [s.log and s.log.seen(b) for s in states for b in range(2)]
    starts = [s.segments and list(s.segments._starts[b]) for s in states for b in range(2)]
    assert not any(s.held or s.fetched or any(s.static) for s in states)
    torch.testing.assert_close(uncaptured_step(model, cache, ids), first)
    for kept, now in zip(seen, [s.log and s.log.seen(b) for s in states for b in range(2)], strict=True):
        assert kept is None or (now is not None and torch.equal(kept.queries, now.queries) and kept.start == now.start)
    assert starts == [s.segments and list(s.segments._starts[b]) for s in states for b in range(2)]


@pytest.mark.parametrize("name", ["prkv", "louiskv"])  # the interpreter takes half a minute for the others' top-k
def test_a_captured_step_is_the_uncaptured_one(name: str) -> None:
    model, cache, ids = prefilled(METHODS[name])
    expected = uncaptured_step(model, cache, ids)
    assert agree("first", captured_step(model, cache, ids), expected) < 1e-4


def test_a_step_that_attends_to_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, cache, ids = prefilled(METHODS["louiskv"])
    expected = uncaptured_step(model, cache, ids)
    step = captured.CapturedDecoder._attend
    monkeypatch.setattr(captured.CapturedDecoder, "_attend", lambda *args: 2 * step(*args))
    with pytest.raises(AssertionError, match=r"product: logits of the captured step differ by 0\.\d+ of their norm"):
        agree("product", captured_step(model, cache, ids), expected)


def test_the_sequence_that_differs_most_decides() -> None:
    expected = torch.randn(3, 50)
    other = expected.clone()
    other[1] *= 1 + 0.9 * TOLERANCE
    assert agree("x", other, expected) == pytest.approx(0.9 * TOLERANCE, rel=1e-3)
    other[2] *= 1 + 1.1 * TOLERANCE
    with pytest.raises(AssertionError, match=r"differ by 0\.033"):
        agree("x", other.bfloat16(), expected)
    other[2] = float("nan")
    with pytest.raises(AssertionError, match="differ by nan"):
        agree("x", other, expected)

"""The check before a benchmark: captured layers answer as uncaptured ones do, and the cache has forgotten the latter."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import kvrecall
from benchmarks import verify
from benchmarks.gpu_layer import COSINE
from benchmarks.inputs import AskingGraph, Turning
from benchmarks.verify import TOLERANCE, WatchedGraph, agree, check_step
from kvrecall import engine
from tests.backends.models import tiny

pytest.importorskip("triton", reason="Triton is only there on Linux")
from kvrecall.backends.transformers.capture.graph import DecodeGraph
from kvrecall.backends.transformers.capture.runner import CapturedSteps
from tests.interpreted.launched import Launched, without_gpu

ZONES: dict[str, Any] = {"sink_tokens": 4, "local_tokens": 16, "update_interval": 8, "top_k": 6, "full_attention_threshold": 0}
EARLY = "speculative:threshold=0.0"
SMALL: dict[str, Any] = {"cluster_tokens": 4, "stretch_tokens": 32, "max_segment_tokens": 8}
METHODS = {
    "early": kvrecall.ParisKV(stage1="product", trigger=EARLY, weight_dtype="float32", **ZONES),
    "prkv": kvrecall.PRKV(page_tokens=2, window_tokens=8, refresh_interval=5, refresh_lead_tokens=2, **ZONES),
    "louiskv": kvrecall.LouisKV(dense_layers=(0,), threshold=-1.0, max_stride=3, **SMALL, **ZONES),
}
LENGTH = 60


class WatchedOnCpu(WatchedGraph, Launched):
    """Keeps what the launches answer."""


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    without_gpu(monkeypatch)
    monkeypatch.setattr(verify, "let_go", lambda: None)


def prefilled(method: kvrecall.Method) -> tuple[Any, kvrecall.RetrievalCache, Tensor]:
    """A model of two layers with one KV head, which the interpreter is fast enough for, a cache of two prompts, and a token."""
    model = tiny("llama", num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1)
    prompt = torch.randint(5, 90, (2, LENGTH), generator=torch.Generator().manual_seed(4))
    cache = kvrecall.RetrievalCache(model.config, method)
    engine.prefill(model, prompt, cache)
    return model, cache, torch.full((2, 1), 17)


def left(cache: kvrecall.RetrievalCache) -> list[Any]:
    """What a step changes of a cache."""
    states = [layer.state for layer in cache.retrieval_layers if layer.state is not None]
    assert not any(s.held or s.fetched or any(s.static) for s in states)
    assert not any("attend" in vars(holder) for holder in cache.retrieval_layers)
    logs = [s.log and s.log.seen(b) for s in states for b in range(2)]
    starts = [s.segments and list(s.segments.starts[b]) for s in states for b in range(2)]
    zones = [s.store.zones(b) for s in states for b in range(2)]
    rows = [s.store.resident.view(b).clone() for s in states for b in range(2)]
    counts = [cache.get_seq_length(), cache.stats().total.counters.steps]
    return [counts, zones, starts, [log and (log.start, log.queries.tolist()) for log in logs], [x.tolist() for x in rows]]


@pytest.mark.parametrize("name", ["early", "prkv", "louiskv"])  # the others' top-k takes the interpreter too long
def test_replayed_layers_answer_as_uncaptured_ones_and_leave_nothing_behind(name: str) -> None:
    model, cache, ids = prefilled(METHODS[name])
    for state in (layer.state for layer in cache.retrieval_layers):
        assert state is not None
        state.end_prompts([0, 1], coming=1)
    before = left(cache)
    assert max(check_step(name, model, cache, ids, 16, graph_class=WatchedOnCpu)) < 1e-4
    assert left(cache) == before
    assert max(check_step(name, model, cache, ids, 16, graph_class=WatchedOnCpu)) < 1e-4


def test_a_layer_that_attends_to_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, cache, ids = prefilled(METHODS["louiskv"])
    step = DecodeGraph._attend
    monkeypatch.setattr(DecodeGraph, "_attend", lambda *asked: 1.1 * step(*asked))
    with pytest.raises(AssertionError, match=r"product, attention of layer 0: differs by 0\.1"):
        check_step("product", model, cache, ids, 16, graph_class=WatchedOnCpu)


def test_layers_are_asked_queries_that_turn() -> None:
    model, cache, ids = prefilled(METHODS["louiskv"])
    captured: Any = CapturedSteps(model, cache, required=True)
    source = Turning(cache.signature, "cpu", torch.float32)
    captured.runner.graph_class = type("Graph", (AskingGraph, WatchedOnCpu), {"source": source})
    asked = []
    for _ in range(3):
        captured.step(ids, 16)
        asked.append(torch.stack([x.queries for x in captured.runner.graph.attended(2)]).flatten(1).float())
    captured.close()
    for before, after in pairwise(asked):
        cosines = torch.cosine_similarity(before, after, -1)
        assert (cosines - COSINE).abs().max() < 0.05  # of 256 numbers per layer
        assert abs(float(after.square().mean()) - 1) < 0.3
    assert torch.cosine_similarity(*asked[0], 0).abs() < 0.3  # two layers


def test_the_sequence_that_differs_most_decides() -> None:
    expected = torch.randn(3, 50)
    other = expected.clone()
    other[1] *= 1 + 0.9 * TOLERANCE
    assert agree("x", other, expected) == pytest.approx(0.9 * TOLERANCE, rel=1e-3)
    other[2] *= 1 + 1.1 * TOLERANCE
    with pytest.raises(AssertionError, match=r"differs by 0\.022"):
        agree("x", other.bfloat16(), expected)
    other[2] = float("nan")
    with pytest.raises(AssertionError, match="differs by nan"):
        agree("x", other, expected)

"""A graph is not trusted before its first replay has answered as the uncaptured layers do."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import kvrecall
from kvrecall import engine
from kvrecall.core.errors import CaptureError, CaptureMismatchError
from kvrecall.layer.state import LayerState
from tests.backends.models import tiny

pytest.importorskip("triton", reason="Triton is only there on Linux")
from kvrecall.attend.whole import WholeAttention
from kvrecall.backends.transformers.capture import runner, verify
from kvrecall.backends.transformers.capture.calls import captured_decoding
from kvrecall.backends.transformers.capture.runner import CapturedSteps, GraphRunner
from kvrecall.layer.slots.dense import DenseSlots
from kvrecall.layer.slots.layers import Layers
from kvrecall.layer.slots.search import SearchSlots
from tests.interpreted.launched import Launched, without_gpu

SMALL: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2}
SINGLE: dict[str, Any] = SMALL | {"num_hidden_layers": 1}
ZONES: dict[str, Any] = {"sink_tokens": 4, "local_tokens": 8, "update_interval": 4, "full_attention_threshold": 0}
# The interpreter rounds to bf16 in a way of its own.
SPHERE: dict[str, Any] = {"top_k": 6, "stage1": "product", "gqa": "mean_softmax", "weight_dtype": "float32", **ZONES}
UNITS: dict[str, Any] = {"top_k": 6, "cluster_tokens": 4, "stretch_tokens": 32, "max_segment_tokens": 4, **ZONES}
METHODS: dict[str, kvrecall.Method] = {
    "every-step": kvrecall.ParisKV(**SPHERE),
    "stride": kvrecall.ParisKV(trigger="fixed-stride:steps=3", **SPHERE),
    "boundary": kvrecall.ParisKV(trigger="semantic-boundary:threshold=0.0", **SPHERE),
    "early": kvrecall.ParisKV(trigger="speculative:threshold=0.0", **SPHERE),
    "page-means": kvrecall.ParisKV(estimate="page-means:page_tokens=4", **SPHERE),
    "segments": kvrecall.LouisKV(dense_layers=(), threshold=0.0, **UNITS),
    "dense": kvrecall.LouisKV(dense_layers=(1,), threshold=0.0, **UNITS),
    "pages": kvrecall.PRKV(top_k=8, page_tokens=2, window_tokens=4, refresh_interval=3, refresh_lead_tokens=2, **ZONES),
}


pytestmark = pytest.mark.usefixtures("several_blocks")


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    without_gpu(monkeypatch)
    monkeypatch.setattr(runner, "bucket_length", lambda tokens: tokens)  # every further room is recorded anew


def prefilled(model: Any, method: kvrecall.Method, sequences: int = 1) -> tuple[kvrecall.RetrievalCache, Tensor]:
    ids = torch.randint(5, 90, (sequences, 40), generator=torch.Generator().manual_seed(4))
    cache = kvrecall.RetrievalCache(model.config, method)
    engine.prefill(model, ids[:, :-1], cache)
    return cache, ids


@pytest.mark.parametrize("name", sorted(set(METHODS) - {"dense"}))
def test_a_trial_is_the_uncaptured_step_and_leaves_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the first capture and at one made anew, where some triggers hold what they have found."""
    model, differences, tables = tiny("llama", **SINGLE), [], []

    def told(made: Tensor, expected: Tensor, difference: Any = verify.difference) -> float:
        differences.append(difference(made, expected))
        return differences[-1]

    def joining(self: Any, joined: Any, join: Any = Layers.join) -> None:
        join(self, joined)
        tables.append(self.table[:, : 27 // joined.states[0].store.pool.block_size + 1].tolist())

    monkeypatch.setattr(verify, "difference", told)
    monkeypatch.setattr(Layers, "join", joining)
    answers, caches = [], []
    for capture in (False, True):
        cache, ids = prefilled(model, METHODS[name])
        caches.append(cache)
        if capture:
            with captured_decoding(model, cache, 2, required=True):
                answers.append(engine.generate(model, None, ids, cache, max_new_tokens=5).new_tokens)
        else:
            answers.append(engine.generate(model, None, ids, cache, max_new_tokens=5).new_tokens)
    assert answers[0] == answers[1]
    assert len(differences) == 2 * 2 and max(differences) < 1e-4  # a layer and logits; room for 2 tokens and for 4
    assert all(blocks == tables[0] for blocks in tables)  # those of the 27 tokens of the zone are no copy's any more
    for counter in ("steps", "searches", "attended_tokens", "retrieved_tokens", "static_tokens"):
        plain, made = (getattr(cache.stats().total.counters, counter) for cache in caches)
        assert made == plain, counter


def turned(step: Any) -> Any:
    """A step whose query heads come in another order: what a kernel answers that reads the queries of other heads."""

    def wrong(self: Any, queries: Tensor, *others: Any) -> Tensor:
        return step(self, queries.roll(1, 1), *others)

    return wrong


def larger(step: Any) -> Any:
    """One sequence answers 3 % too much."""

    def wrong(self: Any, *asked: Any) -> Tensor:
        out = step(self, *asked)
        out[1] *= 1.03
        return out

    return wrong


WRONG = {
    "sphere-heads": (SearchSlots, "step", turned, "every-step", "llama", "layer 0"),
    "sphere-three-per-cent": (SearchSlots, "step", larger, "stride", "llama", "layer 0"),
    "units": (SearchSlots, "step", turned, "dense", "llama", "layer 0"),
    "dense": (DenseSlots, "step", larger, "dense", "llama", "layer 1"),
    "window": (WholeAttention, "launch", larger, "every-step", "gemma2", "layer 0"),
}


@pytest.mark.parametrize(("kind", "what", "how", "name", "family", "where"), WRONG.values(), ids=WRONG.keys())
def test_a_layer_that_answers_wrongly_is_found(
    kind: Any, what: str, how: Any, name: str, family: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny(family, **SMALL)
    monkeypatch.setattr(kind, what, how(getattr(kind, what)))
    cache, ids = prefilled(model, METHODS[name], 2)
    told = f"the attention of {where} differs"
    with pytest.raises(CaptureMismatchError, match=told), captured_decoding(model, cache, 8, required=True):
        engine.generate(model, None, ids, cache, max_new_tokens=4)
    assert all(layer.captured is None for layer in cache.retrieval_layers)


def test_a_wrong_graph_is_not_used_and_one_hears_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model, right = tiny("llama", **SINGLE), SearchSlots.step
    cache, ids = prefilled(model, METHODS["every-step"])
    expected = engine.generate(model, None, ids, cache, max_new_tokens=4).new_tokens
    monkeypatch.setattr(SearchSlots, "step", turned(right))
    for hears in (True, False):  # the second time it is not tried again
        cache, _ = prefilled(model, METHODS["every-step"])
        with captured_decoding(model, cache, 8, required=False), warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            assert engine.generate(model, None, ids, cache, max_new_tokens=4).new_tokens == expected
        assert any("decoding uncaptured: cannot capture" in str(one.message) for one in told) == hears


class Stale(Launched):
    """A replay that does not read the step's tokens."""

    def _record(self, launch: Any) -> None:
        super()._record(launch)
        replay = self._graph.replay

        def stale() -> None:
            before = self.input_ids.clone()
            self.input_ids.fill_(7)
            replay()
            self.input_ids.copy_(before)

        self._graph.replay = stale


def test_a_replay_that_is_wrong_between_the_layers_is_found_by_its_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GraphRunner, "graph_class", Stale)
    model = tiny("llama", **SINGLE)
    cache, ids = prefilled(model, METHODS["every-step"])
    with pytest.raises(CaptureMismatchError, match="logits differ"), captured_decoding(model, cache, 8, True):
        engine.generate(model, None, ids, cache, max_new_tokens=4)


def test_a_graph_made_anew_that_is_wrong_hands_over_to_uncaptured_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """After two right captured tokens."""
    model, made = tiny("llama", **SINGLE), []

    class Second(Launched):
        def _verify(self, launched: Tensor) -> None:
            made.append(int(self.positions[0]))
            if len(made) == 2:
                self.logits = -self.logits
            super()._verify(launched)

    monkeypatch.setattr(GraphRunner, "graph_class", Second)
    cache, ids = prefilled(model, METHODS["stride"])
    expected = engine.generate(model, None, ids, cache, max_new_tokens=7).new_tokens
    cache, _ = prefilled(model, METHODS["stride"])
    with captured_decoding(model, cache, 2, required=False), pytest.warns(RuntimeWarning, match="logits differ"):
        assert engine.generate(model, None, ids, cache, max_new_tokens=7).new_tokens == expected
    assert made == [39, 41]


@pytest.mark.parametrize("fits", ["sequence by sequence", "not at all"])
def test_a_copy_that_does_not_fit(fits: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, glances = tiny("llama", **SINGLE), []

    def short(self: Any, sequences: list[int], copy: Any = LayerState.copied) -> Any:
        glances.append(len(sequences))
        if len(sequences) > 1 or fits == "not at all":
            raise torch.OutOfMemoryError
        return copy(self, sequences)

    monkeypatch.setattr(LayerState, "copied", short)
    cache, ids = prefilled(model, METHODS["every-step"], 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with captured_decoding(model, cache, 8, required=False):
            engine.generate(model, None, ids, cache, max_new_tokens=2)
    assert glances == ([2, 1, 1] if fits == "sequence by sequence" else [2, 1])
    if fits == "not at all":
        cache, ids = prefilled(model, METHODS["every-step"])
        with pytest.raises(CaptureError, match="no memory for a copy of layer 0"):
            CapturedSteps(model, cache, required=True).step(ids[:, -1:], 8)


def test_a_rank_that_sees_fewer_heads_than_the_config_says_is_refused_or_right() -> None:
    """A layer whose state was made for other heads than it is asked by, as a rank's was under tensor parallelism."""
    model = tiny("llama", **SINGLE)
    cache, ids = prefilled(model, METHODS["every-step"])
    for layer in cache.retrieval_layers:
        object.__setattr__(layer.state.shape, "query_heads", 8)
    with pytest.raises(CaptureError, match="layer 0 attends with 2/1 heads, but was made for 8/1"):
        CapturedSteps(model, cache, required=True).step(ids[:, -1:], 8)

"""Forks to other zones: the same state as if the prompt had been read with them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvrecall
from kvrecall import engine, errors
from kvrecall.backends.transformers import RetrievalCache
from kvrecall.backends.transformers.layer import rezoned
from kvrecall.methods import Method
from tests.backends.models import tiny
from tests.backends.test_transformers import prompt, ragged
from tests.layer.test_state import assert_holds, assert_same_answers
from tests.layers import start, state, step

OTHER: dict[str, Any] = {"sink_tokens": 3, "local_tokens": 9, "update_interval": 8, "full_attention_threshold": 0}
RESIDENT = kvrecall.Full(sink_tokens=0, local_tokens=400, update_interval=1)
METHODS: dict[str, Method] = {
    "pariskv": kvrecall.ParisKV(top_k=5, **OTHER),
    "prkv": kvrecall.PRKV(top_k=5, page_tokens=2, window_tokens=8, refresh_interval=5, refresh_lead_tokens=2, **OTHER),
    "ctkvr": kvrecall.CTKVR(top_k=5, tokens_per_centroid=3, recalled_centroids=2, pool_tokens=5, **OTHER),
    "louiskv": kvrecall.LouisKV(top_k=5, dense_layers=(), cluster_tokens=4, stretch_tokens=32, max_segment_tokens=8, **OTHER),
    "h2o": kvrecall.methods.H2O(top_k=5, **OTHER),
    "snapkv": kvrecall.methods.SnapKV(top_k=5, window_tokens=8, **OTHER),
    "full": kvrecall.Full(**OTHER),
}
each = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)


@each
@pytest.mark.parametrize("source", [RESIDENT, kvrecall.ParisKV(top_k=7)], ids=["resident", "zones"])
def test_a_layer_in_other_zones_equals_one_that_has_read_its_prompt_with_them(method: Method, source: Method) -> None:
    first = state(source, 2, observe_queries=100)
    history = start(first, [90, 60])
    other, fresh = rezoned(first, method, observe_queries=100), state(method, 2)
    start(fresh, [90, 60])
    assert other.stats.steps == 0 and [other.store.zones(b) for b in (0, 1)] == [fresh.store.zones(b) for b in (0, 1)]
    assert_holds(other, history)
    assert_same_answers(other, fresh)
    assert_holds(first, history)  # the source has not noticed


@each
def test_both_go_their_own_ways_afterwards(method: Method) -> None:
    first = state(RESIDENT, 1)
    history = start(first, [70])
    other = rezoned(first, method, expect_tokens=100)
    own = start(state(method, 1), [70])
    for number in range(10):
        step(first, history, number)
        step(other, own, 50 + number)
    assert_holds(first, history)
    assert_holds(other, own)


@each
@pytest.mark.parametrize("inputs", [prompt(1, 120), ragged((111, 60, 40))], ids=["one", "ragged"])
def test_answers_after_a_shared_prefill_are_those_of_separate_ones(method: Method, inputs: dict[str, torch.Tensor]) -> None:
    model = tiny("llama")
    ids, mask = inputs["input_ids"], inputs.get("attention_mask")
    base = RetrievalCache(model.config, RESIDENT, observe_queries=200)
    engine.prefill(model, ids[:, :-2], base, attention_mask=None if mask is None else mask[:, :-2], chunk_tokens=32)
    answers = []
    for cache in (base.fork(method), RetrievalCache(model.config, method)):
        answers.append(engine.generate(model, None, ids, cache, max_new_tokens=12, chunk_tokens=32, attention_mask=mask))
    assert answers[0].new_tokens == answers[1].new_tokens
    assert base.get_seq_length() == ids.shape[1] - 2


def test_no_room_for_the_copy_is_said_before(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = tiny("llama"), prompt(1, 60)
    base = RetrievalCache(model.config, RESIDENT)
    engine.prefill(model, inputs["input_ids"], base)
    monkeypatch.setattr("kvrecall.backends.transformers.cache.available_host_bytes", lambda: 1000)
    with pytest.raises(errors.HostMemoryError):
        base.fork(METHODS["pariskv"])
    assert base.fork().get_seq_length() == 60  # shares its rows

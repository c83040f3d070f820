"""A step is recorded once for a model and a method, and replayed for every later request that fits."""

from __future__ import annotations

import gc
import time
from contextlib import nullcontext
from threading import Thread
from typing import Any
from unittest.mock import Mock
from weakref import ref

import pytest
import torch
from torch import Tensor

import kvrecall
from kvrecall import engine
from kvrecall.backends.transformers.cache_name import cache_argument
from kvrecall.backends.transformers.cache_state import pool_of
from tests.backends.models import tiny

pytest.importorskip("triton", reason="Triton is only there on Linux")
from kvrecall.backends.transformers.capture import runner
from kvrecall.backends.transformers.capture.calls import captured_decoding
from kvrecall.backends.transformers.capture.runner import GraphRunner, StepInput
from tests.interpreted.launched import Launched, without_gpu

SMALL: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1}
ZONES: dict[str, Any] = {"sink_tokens": 4, "local_tokens": 8, "update_interval": 4, "full_attention_threshold": 0}
UNITS: dict[str, Any] = {"top_k": 6, "cluster_tokens": 4, "stretch_tokens": 32, "max_segment_tokens": 4, **ZONES}
# The interpreter rounds to bf16 in a way of its own.
METHODS: dict[str, kvrecall.Method] = {
    "sphere": kvrecall.ParisKV(top_k=6, stage1="product", gqa="mean_softmax", weight_dtype="float32", **ZONES),
    "balanced": kvrecall.methods.get("pariskv-balanced", top_k=6, **ZONES),
    "segments": kvrecall.LouisKV(dense_layers=(), threshold=0.0, **UNITS),
    "full": kvrecall.Full(),
}

pytestmark = pytest.mark.usefixtures("several_blocks")


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    without_gpu(monkeypatch)
    monkeypatch.setattr(Launched, "recorded_steps", 0)


def prompt(tokens: int, sequences: int = 1, seed: int = 4) -> Tensor:
    return torch.randint(5, 90, (sequences, tokens), generator=torch.Generator().manual_seed(seed))


def answer(model: Any, method: kvrecall.Method, ids: Tensor, capture: bool, new: int = 3) -> list[list[int]]:
    cache = kvrecall.RetrievalCache(model.config, method)
    engine.prefill(model, ids[:, :-1], cache)
    if not capture:
        return engine.generate(model, None, ids, cache, max_new_tokens=new).new_tokens
    with captured_decoding(model, cache, new, required=True):
        return engine.generate(model, None, ids, cache, max_new_tokens=new).new_tokens


@pytest.mark.parametrize("name", METHODS)
def test_later_requests_replay_what_the_first_one_recorded(name: str) -> None:
    """Of other prompts, one of them a little longer, the caches of the earlier ones gone or still there."""
    model, method, kept = tiny("llama", **SMALL), METHODS[name], []
    for number, tokens in enumerate((40, 40, 42)):
        ids = prompt(tokens, seed=number)
        expected = answer(model, method, ids, False)
        cache = kvrecall.RetrievalCache(model.config, method)
        engine.prefill(model, ids[:, :-1], cache)
        with captured_decoding(model, cache, 3, required=True):
            assert engine.generate(model, None, ids, cache, max_new_tokens=3).new_tokens == expected
        kept.append(cache if number else None)
    assert Launched.recorded_steps == 1


def test_a_cache_knows_the_tokens_of_steps_that_were_only_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """No call of the model has told it; a second turn goes on from them."""
    model, method, ids = tiny("llama", **SMALL), METHODS["sphere"], prompt(40, 3)
    cache, other = (kvrecall.RetrievalCache(model.config, method) for _ in range(2))
    for one in (cache, other):
        engine.prefill(model, ids[:, :-1], one)
    captured = GraphRunner(model)
    fed = [ids[:, -1:]]
    captured.borrow([StepInput(cache, fed[0], 4)])
    monkeypatch.setattr(captured.graph, "_graph", Mock())  # does nothing, as far as Python sees
    for number in range(3):
        captured.step([StepInput(cache, fed[-1], 4)])
        fed.append(torch.full((3, 1), 7 + number))
    captured.close()
    held = cache.tokens.ids()
    assert held is not None and torch.equal(held, torch.cat([ids[:, :-1], *fed[:3]], 1))
    assert cache.tokens.known and cache.get_seq_length() == 42


def test_three_sequences_take_four_slots_and_serve_four(monkeypatch: pytest.MonkeyPatch) -> None:
    model, method = tiny("llama", **SMALL), METHODS["segments"]
    for sequences in (3, 4):
        ids = prompt(40, sequences)
        assert answer(model, method, ids, True) == answer(model, method, ids, False)
    assert Launched.recorded_steps == 1


def test_a_step_with_too_few_slots_or_too_little_room_is_not_used() -> None:
    model, method = tiny("llama", **SMALL), METHODS["sphere"]
    for ids in (prompt(40), prompt(40, 2), prompt(70)):
        assert answer(model, method, ids, True) == answer(model, method, ids, False)
    assert Launched.recorded_steps == 3
    assert answer(model, method, prompt(41), True) == answer(model, method, prompt(41), False)
    assert Launched.recorded_steps == 3


def test_a_model_that_was_changed_is_recorded_anew() -> None:
    """Weights elsewhere, a hook, a setting: a replay would go on with what was."""
    model, method, ids = tiny("llama", **SMALL), METHODS["sphere"], prompt(40)
    answer(model, method, ids, True)
    made = Launched.recorded_steps

    def other_weights() -> None:
        head = model.lm_head
        head.weight = torch.nn.Parameter(-head.weight.detach().clone())

    def hook() -> None:
        model.lm_head.register_forward_hook(lambda module, inputs, out: -out)

    def setting() -> None:
        norm = model.model.norm
        norm.variance_epsilon = 100 * norm.variance_epsilon

    for change in (other_weights, hook, setting):
        change()
        assert answer(model, method, ids, True) == answer(model, method, ids, False)
        made += 1
        assert Launched.recorded_steps == made
        answer(model, method, ids, True)
        assert Launched.recorded_steps == made


def test_no_more_than_a_few_steps_are_kept_and_release_drops_them() -> None:
    model, method = tiny("llama", **SMALL), METHODS["sphere"]
    for tokens in (40, 60, 90, 120, 160):
        answer(model, method, prompt(tokens), True, 1)
    assert runner.release(model) == 4 and runner.release(model) == 0
    answer(model, method, prompt(40), True, 1)
    assert Launched.recorded_steps == 6


def test_a_recorded_step_keeps_no_cache_and_its_memory_serves_the_next_request() -> None:
    model, method = tiny("llama", **SMALL), METHODS["balanced"]
    ids = prompt(40)
    cache = kvrecall.RetrievalCache(model.config, method)
    engine.prefill(model, ids[:, :-1], cache)
    with captured_decoding(model, cache, 3, required=True):
        engine.generate(model, None, ids, cache, max_new_tokens=3)
    rows, gone = cache.retrieval_layers[0].state.store.memory.rows.data_ptr(), ref(cache)
    pool = pool_of(model, torch.device("cpu"))
    del cache
    gc.collect()
    assert gone() is None and not pool.used
    again = kvrecall.RetrievalCache(model.config, method)
    engine.prefill(model, ids, again)
    assert again.retrieval_layers[0].state.store.memory.rows.data_ptr() == rows


@pytest.mark.parametrize("name", METHODS)
def test_guessed_tokens_come_between_captured_steps(name: str) -> None:
    """They are checked uncaptured on the cache itself, some are taken back, and the graph goes on from what is left."""
    model, method = tiny("llama", **SMALL), METHODS[name]
    ids = torch.cat([prompt(40), torch.tensor([[95]])], 1)  # which stands nowhere else: nothing is guessed at once
    answers, caches = [], [kvrecall.RetrievalCache(model.config, method) for _ in range(2)]
    held = sorted(set(ids[0].tolist()))
    known: dict[str, Any] = {"suppress_tokens": [n for n in range(model.config.vocab_size) if n not in held]}
    how: dict[str, Any] = known | {"max_new_tokens": 14, "do_sample": True, "top_k": 3, "prompt_lookup_num_tokens": 3}
    with kvrecall.attach(model):
        for cache in caches:
            torch.manual_seed(2)
            capturing = captured_decoding(model, cache, 16, required=True) if cache is caches[1] else nullcontext()
            with capturing:
                answers.append(model.generate(ids, **cache_argument(cache), **how))
    assert torch.equal(*answers) and Launched.recorded_steps
    for one, other in zip(caches[0].retrieval_layers, caches[1].retrieval_layers, strict=True):
        assert one.state is not None and other.state is not None and other.captured is None
        assert one.state.store.zones(0) == other.state.store.zones(0)
        assert one.state.stats.steps == other.state.stats.steps > 13  # wrong guesses were steps, too


def test_two_threads_never_take_the_same_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both look for a step while one that is recorded is nobody's: the second one that looks gets a step of its own."""
    model, method, find = tiny("llama", **SMALL), METHODS["sphere"], runner._find
    answer(model, method, prompt(40), True)
    caches = [kvrecall.RetrievalCache(model.config, method) for _ in range(2)]
    for cache in caches:
        engine.prefill(model, prompt(39), cache)

    def slowly(*args: Any) -> Any:
        found = find(*args)
        time.sleep(0.3)
        return found

    monkeypatch.setattr(runner, "_find", slowly)
    runners, tokens = [GraphRunner(model) for _ in caches], torch.zeros(1, 1, dtype=torch.int64)
    threads = [
        Thread(target=own.borrow, args=([StepInput(cache, tokens, 4)],)) for own, cache in zip(runners, caches, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    graphs = [own.graph for own in runners]
    assert graphs[0] is not graphs[1] and [len(graph.leases) for graph in graphs if graph is not None] == [1, 1]
    for own in runners:
        own.close()

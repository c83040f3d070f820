"""Chunked prefill: the same cache in any chunks, progress, resumption after an interruption, refusals."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import kvrecall
from kvrecall import engine, errors
from kvrecall.backends.transformers.cache_name import cache_argument
from kvrecall.engine.prefill import chunk_size
from tests.backends.models import tiny
from tests.backends.test_transformers import METHODS, ZONES, in_chunks, prompt, ragged, run
from tests.blocks import small_blocks

inputs_ = pytest.mark.parametrize("inputs", [prompt(2), ragged(), prompt(1, 1)], ids=["even", "ragged", "one-token"])


def new_cache(model: Any, method: kvrecall.Method = METHODS["pariskv"]) -> kvrecall.RetrievalCache:
    return kvrecall.RetrievalCache(model.config, method)


def contents(cache: kvrecall.RetrievalCache) -> list[torch.Tensor]:
    """K and V of every sequence of every layer of ours, in order."""
    stores = [layer.state.store for layer in cache.retrieval_layers]
    return [torch.cat(list(store.blocks(b)), 1) for store in stores for b in range(store.sequences)]


def follow_up(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.cat([x, x[:, -1:].expand(-1, 5)], 1) for name, x in inputs.items()}


@pytest.mark.parametrize(("family", "inputs", "chunk"), in_chunks(["llama", "gemma2", "gpt_oss"], [2, 37, 110, 1024]))
def test_any_chunks_fill_the_cache_alike(family: str, inputs: dict[str, torch.Tensor], chunk: int) -> None:
    model = tiny(family)
    cache, whole = new_cache(model), new_cache(model)
    engine.prefill(model, inputs["input_ids"], cache, chunk_tokens=chunk, attention_mask=inputs["attention_mask"])
    with kvrecall.attach(model), torch.no_grad():
        positions = (inputs["attention_mask"].cumsum(1) - 1).clamp_min(0)
        model(**inputs, position_ids=positions, **cache_argument(whole))
    for ours, theirs in zip(contents(cache), contents(whole), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    with kvrecall.attach(model):
        answer = run(model, cache, follow_up(inputs))
    assert torch.equal(answer, run(model, DynamicCache(config=model.config), follow_up(inputs)))


def test_progress_counts_every_chunk_up_to_the_whole() -> None:
    model, seen = tiny("llama"), []
    engine.prefill(model, prompt(1)["input_ids"], new_cache(model), chunk_tokens=40, on_progress=lambda *x: seen.append(x))
    assert seen == [(0, 111), (40, 111), (80, 111), (111, 111)]


def test_a_cached_prefix_is_not_computed_again() -> None:
    model, cache, seen = tiny("llama"), new_cache(tiny("llama")), []
    ids = prompt(1)["input_ids"]
    engine.prefill(model, ids[:, :60], cache)
    cache.on_queries = lambda layer, queries: seen.append(queries.shape[2]) if layer == 0 else None
    engine.prefill(model, ids, cache)
    assert seen == [51]
    engine.prefill(model, ids, cache)
    assert seen == [51] and cache.get_seq_length() == 111


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3", "gpt_oss"])
@pytest.mark.parametrize("where", ["between-chunks", "in-a-layer"])
@inputs_
def test_interrupted_prefill_goes_on_where_it_stopped(family: str, where: str, inputs: dict[str, torch.Tensor]) -> None:
    model = tiny(family)
    cache, calls, usual = new_cache(model), [], model.config._attn_implementation

    def stop(*_: object) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt

    hook = model.model.layers[1].register_forward_pre_hook(stop) if where == "in-a-layer" else None
    given: dict[str, Any] = {"chunk_tokens": 30, "attention_mask": inputs["attention_mask"]}
    arguments = model, inputs["input_ids"], cache
    if inputs["input_ids"].shape[1] > 90:
        with pytest.raises(KeyboardInterrupt):
            engine.prefill(*arguments, **given, on_progress=None if hook else stop)
        assert {layer.get_seq_length() for layer in cache.layers} == {60}
    engine.prefill(*arguments, **given)
    if hook:
        hook.remove()
    assert model.config._attn_implementation == usual
    with kvrecall.attach(model):
        answer = run(model, cache, follow_up(inputs))
    assert torch.equal(answer, run(model, DynamicCache(config=model.config), follow_up(inputs)))


def test_the_first_tokens_behind_a_prompt_get_host_memory_for_the_expected_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, for all layers; the prompt itself takes what it needs and an eighth more."""
    small_blocks(monkeypatch)
    model, inputs = tiny("llama"), prompt(1)
    cache, tokens = new_cache(model), inputs["input_ids"].shape[1]
    engine.prefill(model, inputs["input_ids"], cache, chunk_tokens=30, expect_tokens=500)
    tables = {id(layer.state.store.host[0].block_table) for layer in cache.retrieval_layers}
    assert len(tables) == 1 and (tokens - 20) // 16 <= len(cache.tables[0].blocks) <= (tokens - 20) * 9 // 8 // 16 + 1
    with kvrecall.attach(model):
        run(model, cache, follow_up(inputs), new_tokens=24)  # the buffer goes over
    assert len(cache.tables[0].blocks) == (500 - 4 - 16) // 16


def test_small_budgets_prefill_densely() -> None:
    """A budget limits decoding, never the prompt: keys of later layers depend on exact attention in earlier ones."""
    model = tiny("llama")
    small, full = new_cache(model, kvrecall.ParisKV(top_k=1, **ZONES)), new_cache(model, METHODS["full"])
    for cache in (small, full):
        engine.prefill(model, prompt(1)["input_ids"], cache, chunk_tokens=37)
    for ours, theirs in zip(contents(small), contents(full), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("chunk", [1, 11, 110])
def test_a_chunk_of_one_token_is_prefill_too(chunk: int) -> None:
    """The last chunk of 111 tokens, or every chunk, has one token: dense all the same, and the zones settle."""
    model = tiny("llama")
    small, full = new_cache(model, kvrecall.ParisKV(top_k=1, **ZONES)), new_cache(model, METHODS["full"])
    engine.prefill(model, prompt(1)["input_ids"], small, chunk_tokens=chunk)
    engine.prefill(model, prompt(1)["input_ids"], full, chunk_tokens=111)
    for ours, theirs in zip(contents(small), contents(full), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    assert small.stats().total.tokens == full.stats().total.tokens


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"input_ids": torch.zeros(1, 0, dtype=torch.int64)}, errors.ShapeError, "input_ids"),
        ({"input_ids": torch.zeros(5, dtype=torch.int64)}, errors.ShapeError, "input_ids"),
        ({"input_ids": torch.zeros(1, 4097, dtype=torch.int64)}, errors.ContextLengthError, "prompt: expected at most 4,096"),
        ({"chunk_tokens": 0}, errors.ParameterError, "chunk_tokens"),
        ({"attention_mask": torch.ones(2, 111)}, errors.ShapeError, "attention_mask"),
    ],
    ids=["empty", "one-dimensional", "too-long", "no-chunk", "other-mask"],
)
def test_refusals_store_nothing(change: dict[str, Any], error: type[Exception], match: str) -> None:
    model = tiny("llama")
    cache = new_cache(model)
    given = {"input_ids": prompt(1)["input_ids"], **change}
    with pytest.raises(error, match=match):
        engine.prefill(model, given.pop("input_ids"), cache, **given)
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize(("device", "sequences", "asked", "found"), [
    ("cpu", 1, None, 1024), ("cuda", 1, None, 8192), ("cuda", 4, None, 2048), ("cuda", 28, None, 1024), ("cuda", 4, 300, 300),
])  # fmt: skip
def test_chunks_suit_the_device_and_the_batch(device: str, sequences: int, asked: int | None, found: int) -> None:
    model: Any = SimpleNamespace(device=torch.device(device))
    assert chunk_size(model, asked, sequences) == found

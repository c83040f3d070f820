"""Generation: transformers' tokens with a covering budget, streaming, sampling, ends, reuse of the cache."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import kvrecall
from kvrecall import engine
from kvrecall.core.errors import ParameterError
from tests.backends.models import tiny
from tests.backends.test_transformers import METHODS, in_chunks, prompt, ragged, run
from tests.tiny import WORDS, tiny_tokenizer


def new_cache(model: Any, method: kvrecall.Method = METHODS["pariskv"]) -> kvrecall.RetrievalCache:
    return kvrecall.RetrievalCache(model.config, method)


@pytest.mark.parametrize(("family", "inputs", "chunk"), in_chunks(["llama", "gemma2", "gpt_oss"], [30, 110, 111, 1024]))
def test_equals_transformers(family: str, inputs: dict[str, torch.Tensor], chunk: int) -> None:
    model = tiny(family)
    expected = run(model, DynamicCache(config=model.config), inputs)
    for method in METHODS.values():
        result = engine.generate(
            model, None, inputs["input_ids"], new_cache(model, method), max_new_tokens=40, chunk_tokens=chunk,
            attention_mask=inputs["attention_mask"],
        )  # fmt: skip
        assert torch.equal(result.sequences, expected)
        assert result.new_tokens == expected[:, inputs["input_ids"].shape[1] :].tolist()
        assert result.texts is None and result.prefill_seconds > 0 and result.decode_seconds > 0


def test_the_same_prompt_again_costs_one_token() -> None:
    model, seen = tiny("llama"), []
    cache, ids = new_cache(model), prompt(1)["input_ids"]
    first = engine.generate(model, None, ids, cache, max_new_tokens=12)
    cache.on_queries = lambda layer, queries: seen.append(queries.shape[2]) if layer == 0 else None
    again = engine.generate(model, None, ids, cache, max_new_tokens=12)
    assert torch.equal(again.sequences, first.sequences) and seen == [1] * 12


def test_a_conversation_computes_only_what_is_new() -> None:
    model, seen = tiny("llama"), []
    cache, ids = new_cache(model), prompt(1)["input_ids"]
    for turn in range(3):
        before = cache.get_seq_length()
        cache.on_queries = lambda layer, queries: seen.append(queries.shape[2]) if layer == 0 else None
        result = engine.generate(model, None, ids, cache, max_new_tokens=12, chunk_tokens=50)
        assert torch.equal(result.sequences, run(model, DynamicCache(config=model.config), _all_ones(ids), new_tokens=12))
        assert sum(seen) == ids.shape[1] - before + 11
        seen.clear()
        ids = torch.cat([result.sequences, prompt(1, 20 + turn)["input_ids"]], 1)


def _all_ones(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@pytest.mark.parametrize("top_p", [1.0, 0.7])
def test_a_seed_fixes_the_sample_and_leaves_the_global_generator_alone(top_p: float) -> None:
    model, ids = tiny("llama"), prompt(1)["input_ids"]

    def sample(seed: int | None) -> list[list[int]]:
        cache = new_cache(model)
        return engine.generate(model, None, ids, cache, max_new_tokens=20, temperature=1.5, top_p=top_p, seed=seed).new_tokens

    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = sample(7)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert sample(7) == first and sample(8) != first
    assert sample(None) != sample(None)


def test_temperature_and_top_p_alone_shape_the_sample() -> None:
    """A top_p of 1 samples from all tokens; neither transformers' default top_k nor the model's own one cuts the tail."""
    model, ids = tiny("llama"), prompt(1)["input_ids"]
    model.generation_config.top_k = 1
    first = {
        engine.generate(model, None, ids, new_cache(model), max_new_tokens=1, temperature=1e6, seed=seed).new_tokens[0][0]
        for seed in range(120)
    }
    assert len(first) > 75  # 120 draws from 320 tokens show about 100 of them; from 50 they could show 50 at most


@pytest.mark.parametrize(("batch", "with_tokenizer"), [(2, True), (1, False)], ids=["two-sequences", "no-tokenizer"])
def test_streaming_that_cannot_work_is_refused_before_anything_is_stored(batch: int, with_tokenizer: bool) -> None:
    model = tiny("llama", vocab_size=len(WORDS))
    cache = new_cache(model)
    ids = torch.randint(5, len(WORDS), (batch, 60), generator=torch.Generator().manual_seed(0))
    with pytest.raises(ParameterError, match="on_text"):
        tokenizer = tiny_tokenizer() if with_tokenizer else None
        engine.generate(model, tokenizer, ids, cache, max_new_tokens=3, chunk_tokens=20, on_text=print)
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize("listed", [False, True], ids=["one-id", "several-ids"])
def test_every_sequence_ends_at_its_own_end(listed: bool) -> None:
    model, inputs = tiny("llama"), ragged()
    free = run(model, DynamicCache(config=model.config), inputs)[:, 111:]
    end = next(int(t) for t in free[0] if (free == t).any(1).sum() < 3)
    result = engine.generate(
        model, None, inputs["input_ids"], new_cache(model), max_new_tokens=40, attention_mask=inputs["attention_mask"],
        eos_token_id=[end, 319] if listed else end,
    )  # fmt: skip
    for got, whole in zip(result.new_tokens, free.tolist(), strict=True):
        stops = [i for i, t in enumerate(whole) if t == end or (listed and t == 319)]
        assert got == whole[: stops[0] + 1 if stops else 40]


def test_one_token() -> None:
    model, ids = tiny("llama"), prompt(2)["input_ids"]
    result = engine.generate(model, None, ids, new_cache(model), max_new_tokens=1)
    assert torch.equal(result.sequences, run(model, DynamicCache(config=model.config), prompt(2), new_tokens=1))


def test_pieces_of_text_join_up_to_the_answer_and_tokens_are_counted() -> None:
    model, tokenizer = tiny("llama", vocab_size=len(WORDS)), tiny_tokenizer()
    ids = torch.randint(5, len(WORDS), (1, 60), generator=torch.Generator().manual_seed(0))
    pieces, counts, progress = [], [], []
    result = engine.generate(
        model, tokenizer, ids, new_cache(model), max_new_tokens=30, chunk_tokens=20, on_text=pieces.append,
        on_token=counts.append, on_prefill=lambda *x: progress.append(x), temperature=2.0, seed=3, eos_token_id=2,
    )  # fmt: skip
    assert result.texts is not None and len(result.texts) == 1
    assert "".join(pieces).strip() == result.texts[0].strip() and len(pieces) > 1
    assert counts == list(range(1, len(result.new_tokens[0]) + 1))
    assert progress[0] == (0, 60) and progress[-1] == (60, 60)
    assert [done for done, _ in progress] == sorted(done for done, _ in progress)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_an_interrupted_answer_leaves_a_cache_to_ask_again(family: str) -> None:
    model, ids = tiny(family), prompt(1)["input_ids"]
    cache, usual = new_cache(model), model.config._attn_implementation

    def stop(count: int) -> None:
        if count == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.generate(model, None, ids, cache, max_new_tokens=12, on_token=stop)
    assert len({layer.get_seq_length() for layer in cache.layers}) == 1
    assert model.config._attn_implementation == usual
    if family == "gemma2":  # sliding windows cannot be rolled back to the end of the prompt
        cache.reset()
    again = engine.generate(model, None, ids, cache, max_new_tokens=12)
    assert torch.equal(again.sequences, run(model, DynamicCache(config=model.config), prompt(1), new_tokens=12))


def test_a_method_gets_a_cache_of_its_own() -> None:
    model, prompt = tiny("llama"), torch.randint(5, 90, (2, 60), generator=torch.Generator().manual_seed(9))
    method = kvrecall.ParisKV(top_k=4, sink_tokens=2, local_tokens=8, update_interval=4, full_attention_threshold=0)
    cache = kvrecall.RetrievalCache(model.config, method)
    expected = engine.generate(model, None, prompt, cache, max_new_tokens=9)
    made = engine.generate(model, None, prompt, method, max_new_tokens=9)
    assert made.new_tokens == expected.new_tokens and expected.cache is cache
    assert made.cache.method == method and made.cache is not cache
    assert made.cache.stats().total.counters.steps == cache.stats().total.counters.steps > 0


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"eos_token_id": "a"}, "eos_token_id: expected an integer >= 0, got 'a'"),
        ({"eos_token_id": [2, -1]}, "eos_token_id: expected an integer >= 0, got -1"),
        ({"on_token": 3}, "on_token: expected a function, got 3"),
        ({"attention_mask": [1]}, "attention_mask: expected a tensor of zeros and ones, got 'list'"),
        ({"seed": 1.5}, "seed: expected an integer, got 1.5"),
    ],
)
def test_odd_arguments_are_refused_by_name(wrong: dict[str, Any], message: str) -> None:
    model = tiny("llama", num_hidden_layers=1)
    cache = kvrecall.RetrievalCache(model.config, kvrecall.Exact(top_k=8))
    with pytest.raises(ParameterError, match=re.escape(message)):
        engine.generate(model, None, torch.ones(1, 4, dtype=torch.int64), cache, max_new_tokens=2, **wrong)
    assert not cache.get_seq_length()

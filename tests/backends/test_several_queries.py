"""Several tokens in one call of a model: decode queries, or a chunk of a prompt where somebody says so or there are many."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import kvrecall
from kvrecall import engine
from kvrecall.backends.base import MOST_QUERIES
from kvrecall.backends.transformers.cache_name import cache_argument
from tests.backends.models import tiny
from tests.backends.test_transformers import ragged
from tests.engine.users import METHODS as SPARSE

FAMILIES = ("llama", "gemma2", "gemma3", "gpt_oss")


def drawn(tokens: int, seed: int = 3) -> Tensor:
    return torch.randint(3, 320, (1, tokens), generator=torch.Generator().manual_seed(seed))


def read(model: Any, ids: Tensor, method: str = "pariskv") -> kvrecall.RetrievalCache:
    """A cache that holds a prompt."""
    cache = kvrecall.RetrievalCache(model.config, SPARSE[method])
    engine.prefill(model, ids, cache, chunk_tokens=64)
    return cache


def zones(cache: kvrecall.RetrievalCache) -> list[Any]:
    states = [layer.state for layer in cache.retrieval_layers if layer.state is not None]
    return [state.store.zones(b) for state in states for b in range(state.store.sequences)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", SPARSE)
@torch.no_grad()
def test_guessed_tokens_change_no_greedy_answer(family: str, method: str) -> None:
    """Under transformers' own loop: wrong guesses leave nothing behind, in layers that retrieve and in sliding windows."""
    model, ids = tiny(family), drawn(150)
    ids[:, -1] = 2  # which stands nowhere else: a first guess would come in one call with the prompt, as a part of it
    answers, caches = [], [kvrecall.RetrievalCache(model.config, SPARSE[method]) for _ in range(2)]
    with kvrecall.attach(model):
        for cache, guessing in zip(caches, ({}, {"prompt_lookup_num_tokens": 5}), strict=True):
            how: dict[str, Any] = {"max_new_tokens": 28, "do_sample": False, **guessing}
            answers.append(model.generate(ids, **cache_argument(cache), **how))
    assert torch.equal(*answers)
    assert zones(caches[0]) == zones(caches[1])
    steps = [cache.stats().total.counters.steps for cache in caches]
    assert steps[1] > steps[0]  # each guessed token was a step of its own


@pytest.mark.parametrize("count", [2, MOST_QUERIES, MOST_QUERIES + 1])
@torch.no_grad()
def test_few_tokens_are_queries_and_many_a_chunk(count: int) -> None:
    model, turn = tiny("llama"), drawn(count, 9)
    one, other = (read(model, drawn(100)) for _ in range(2))
    with kvrecall.attach(model):
        made = model(turn, **cache_argument(one)).logits
        alone = torch.cat([model(turn[:, t : t + 1], **cache_argument(other)).logits for t in range(count)], 1)
    queries = count <= MOST_QUERIES
    assert [report.counters.steps for report in one.stats().layers] == [count if queries else 0] * 3
    assert (zones(one) == zones(other)) == queries
    if queries:
        torch.testing.assert_close(made, alone, atol=1e-4, rtol=1e-4)
    else:
        assert all(each.buffer == 0 for each in zones(one))


@torch.no_grad()
def test_a_short_chunk_is_a_prompt_s_where_somebody_says_so() -> None:
    """Then it is attended densely, as by full attention, and its zones are settled."""
    model, turn = tiny("llama"), drawn(5, 9)
    cache, full = read(model, drawn(100)), read(model, drawn(100), "full")
    with kvrecall.attach(model):
        with cache.reading_prompt():
            made = model(turn, **cache_argument(cache)).logits
            assert cache.prefilling
        with pytest.raises(RuntimeError, match="stop"), cache.reading_prompt():
            raise RuntimeError("stop")
        expected = model(turn, **cache_argument(full)).logits
    assert not cache.prefilling
    torch.testing.assert_close(made, expected, atol=1e-4, rtol=1e-4)
    assert cache.stats().total.counters.steps == 0 and all(each.buffer == 0 for each in zones(cache))


@torch.no_grad()
def test_ragged_batches_with_padding_between_the_tokens() -> None:
    model, inputs = tiny("llama"), ragged()
    turn = torch.randint(3, 320, (3, 4), generator=torch.Generator().manual_seed(5))
    fresh = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1], [0, 1, 0, 1]])
    mask = torch.cat([inputs["attention_mask"], fresh], 1)
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    start = inputs["attention_mask"].shape[1]
    cache = kvrecall.RetrievalCache(model.config, SPARSE["pariskv"])
    with kvrecall.attach(model):
        model(**inputs, position_ids=positions[:, :start], **cache_argument(cache))
        made = model(turn, attention_mask=mask, position_ids=positions[:, start:], **cache_argument(cache)).logits
        for b, real in enumerate(fresh.bool()):
            alone = kvrecall.RetrievalCache(model.config, SPARSE["pariskv"])
            model(inputs["input_ids"][b : b + 1, inputs["attention_mask"][b].bool()], **cache_argument(alone))
            steps = [model(token[None, None], **cache_argument(alone)).logits[0] for token in turn[b, real]]
            torch.testing.assert_close(made[b, real], torch.cat(steps), atol=1e-4, rtol=1e-4)
            mine, theirs = (each.retrieval_layers[0].state.store.zones(at) for each, at in ((cache, b), (alone, 0)))  # type: ignore[union-attr]
            assert mine == theirs


def test_a_short_rest_of_a_prompt_in_the_loop_is_a_chunk() -> None:
    """Whatever is left of a prompt, or of a later turn, when the loop makes its last call for it."""
    model, ids = tiny("llama"), drawn(70)
    cache = kvrecall.RetrievalCache(model.config, SPARSE["pariskv"])
    made = engine.generate(model, None, ids, cache, max_new_tokens=1, chunk_tokens=5)
    assert cache.stats().total.counters.steps == 0
    longer = torch.cat([made.sequences, drawn(3, 8)], 1)
    engine.generate(model, None, longer, cache, max_new_tokens=1, chunk_tokens=64)
    assert cache.stats().total.counters.steps == 0 and cache.get_seq_length() == 74

"""A cache's content is a prompt's beginning only where the ids are the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvrecall
from kvrecall import engine, errors
from kvrecall.backends.transformers.cache_name import cache_argument
from tests.backends.models import tiny
from tests.backends.test_attach import COVERING, answer, ids


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("llama")


def generate(model: Any, prompt: torch.Tensor, cache: kvrecall.RetrievalCache, **given: Any) -> torch.Tensor:
    return engine.generate(model, None, prompt, cache, max_new_tokens=6, **given).sequences


def prompts() -> dict[str, torch.Tensor]:
    """After ids(60): the same, longer, shorter, another one, one that leaves it in the middle, one that is a single token."""
    middle = ids(60).clone()
    middle[:, 31] = 3 if middle[0, 31] == 4 else 4
    return {
        "same": ids(60), "longer": torch.cat([ids(60), ids(20, 7)], 1), "shorter": ids(60)[:, :40], "another": ids(60, 9),
        "middle": middle, "one-token": ids(1, 9), "longer-and-another": ids(90, 9),
    }  # fmt: skip


@pytest.mark.parametrize("name", prompts())
@pytest.mark.parametrize("read", ["generate", "prefill", "model.generate"])
def test_another_prompt_is_read(model: Any, name: str, read: str) -> None:
    cache = kvrecall.RetrievalCache(model.config, COVERING)
    if read == "prefill":
        engine.prefill(model, ids(60), cache, chunk_tokens=16)
    elif read == "generate":
        generate(model, ids(60), cache)
    else:
        with kvrecall.attach(model):
            answer(model, ids(60), cache)
    prompt = prompts()[name]
    assert torch.equal(generate(model, prompt, cache), answer(model, prompt))
    held = cache.tokens.ids()
    assert held is not None and torch.equal(held, cache_of(model, prompt).tokens.ids())


def cache_of(model: Any, prompt: torch.Tensor) -> kvrecall.RetrievalCache:
    cache = kvrecall.RetrievalCache(model.config, COVERING)
    generate(model, prompt, cache)
    return cache


def test_only_what_differs_is_read_again(model: Any) -> None:
    cache, fed = kvrecall.RetrievalCache(model.config, COVERING), []
    generate(model, ids(60), cache)
    cache.on_queries = lambda layer, queries: fed.append(queries.shape[2]) if layer == 0 else None
    generate(model, prompts()["middle"], cache)
    assert sum(fed) == 60 - 31 + 5


def test_ids_follow_forks_crops_and_selections(model: Any) -> None:
    cache = kvrecall.RetrievalCache(model.config, COVERING)
    batch = torch.cat([ids(30, seed) for seed in (1, 2, 3)])
    engine.prefill(model, batch, cache)
    fork = cache.fork()
    cache.batch_select_indices(torch.tensor([2, 0]))
    cache.crop(-10)
    assert torch.equal(cache.tokens.ids(), batch[[2, 0], :20])
    assert torch.equal(fork.tokens.ids(), batch)
    cache.batch_repeat_interleave(2)
    assert torch.equal(cache.tokens.ids(), batch[[2, 2, 0, 0], :20])
    cache.reset()
    assert cache.tokens.ids() is None and cache.tokens.known


def test_padding_is_compared_by_the_mask(model: Any) -> None:
    """Ids of padding do not matter; padding where a token was does."""
    mask = torch.ones(1, 60, dtype=torch.int64)
    mask[:, :7] = 0
    cache = kvrecall.RetrievalCache(model.config, COVERING)
    generate(model, ids(60), cache, attention_mask=mask)
    other = ids(60).clone()
    other[:, :7] = 0
    length = cache.get_seq_length()
    fed: list[int] = []
    cache.on_queries = lambda layer, queries: fed.append(queries.shape[2]) if layer == 0 else None
    generate(model, other, cache, attention_mask=mask)
    assert sum(fed) == 6 and cache.get_seq_length() == length
    cache.on_queries = None
    assert torch.equal(generate(model, ids(60), cache), answer(model, ids(60)))


def test_another_batch_is_refused(model: Any) -> None:
    cache = kvrecall.RetrievalCache(model.config, COVERING)
    generate(model, ids(60), cache)
    with pytest.raises(errors.ShapeError, match="batch: expected 1 sequences, got 2"):
        generate(model, ids(60).repeat(2, 1), cache)
    assert torch.equal(generate(model, ids(60), cache), answer(model, ids(60)))


def test_embeddings_cannot_be_compared(model: Any) -> None:
    cache = kvrecall.RetrievalCache(model.config, COVERING)
    with kvrecall.attach(model), torch.no_grad():
        model(inputs_embeds=model.get_input_embeddings()(ids(60)), **cache_argument(cache))
    with pytest.raises(errors.ParameterError, match=r"embeddings or images.*reset\(\)"):
        generate(model, ids(60), cache)
    cache.reset()
    assert torch.equal(generate(model, ids(60), cache), answer(model, ids(60)))

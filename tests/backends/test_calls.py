"""Calls of an attached model that kvrecall does as the plain model does, or refuses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from kvrecall import attach, errors
from kvrecall.backends.transformers.cache_name import cache_argument
from tests.backends.models import tiny
from tests.backends.test_attach import answer, ids, llama, new_cache


@contextmanager
def refused(model: Any, error: type[Exception], says: str) -> Iterator[Any]:
    """Inside, a cache of the model is refused, and holds nothing afterwards."""
    cache = new_cache(model)
    with attach(model):
        with pytest.raises(error, match=says):
            yield cache
        assert cache.get_seq_length() == 0
        assert torch.equal(answer(model, ids(), cache), answer(model, ids()))


@pytest.mark.parametrize("filling", [0, 1])
def test_masks_longer_than_the_tokens(filling: int) -> None:
    """As static shapes have them: what lies behind the tokens does not matter."""
    model = llama()
    mask = torch.full((1, 90), filling)
    mask[:, :60] = 1
    mask[:, :5] = 0
    with torch.no_grad(), attach(model):
        caches = new_cache(model), DynamicCache(config=model.config)
        for tokens in (ids(40), ids(20, 2)):
            got, want = (model(tokens, attention_mask=mask, **cache_argument(cache)).logits for cache in caches)
            torch.testing.assert_close(got[:, 5:], want[:, 5:], atol=1e-3, rtol=1e-3)
    assert caches[0].retrieval_layers[0].state.store.zones(0).total == 55


def test_masks_that_are_too_short() -> None:
    model = llama()
    with refused(model, errors.ShapeError, r"attention_mask: expected a 2-D padding mask \[1, 60\]") as cache:
        model(ids(), attention_mask=torch.ones(1, 59), **cache_argument(cache))


def test_only_the_new_tokens() -> None:
    model = llama()
    cache = new_cache(model)
    with attach(model):
        first = answer(model, ids(), cache)
        with pytest.raises(errors.ShapeError, match="Pass the whole conversation"):
            answer(model, ids(5, 2), cache)
        whole = torch.cat([first, ids(5, 2)], 1)
        assert torch.equal(answer(model, whole, cache), answer(model, whole))


def test_another_batch() -> None:
    model = llama()
    cache = new_cache(model)
    with attach(model):
        first = answer(model, ids(), cache)
        with pytest.raises(errors.ShapeError, match="batch: expected 1 sequences, got 3"):
            answer(model, torch.cat([first, ids(5, 2)], 1).repeat(3, 1), cache)
        whole = torch.cat([first, ids(5, 2)], 1)
        assert torch.equal(answer(model, whole, cache), answer(model, whole))


def test_attention_weights() -> None:
    model = llama()
    with refused(model, errors.ParameterError, "output_attentions: expected False") as cache, torch.no_grad():
        model.model.layers[0].self_attn.config._output_attentions = False
        model(ids(), **cache_argument(cache), output_attentions=True)


def test_unknown_arguments_are_refused_by_name() -> None:
    model = llama()
    with refused(model, errors.UnsupportedModelError, "attention with the argument position_bias, tilt") as cache:
        model(ids(), **cache_argument(cache), position_bias=torch.zeros(1), tilt=3)


def test_gradients() -> None:
    model = llama()
    cache = new_cache(model)
    with attach(model):
        loss = model(ids(), **cache_argument(cache), labels=ids()).loss
        with pytest.raises(errors.ParameterError, match="Retrieval has no gradient"):
            loss.backward()


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_autocast(family: str) -> None:
    model = tiny(family)
    cache = new_cache(model)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        want = model(ids()).logits
        with attach(model):
            got = model(ids(), **cache_argument(cache)).logits
            model(ids(1, 2), **cache_argument(cache))
    assert cache.retrieval_layers[0].state.shape.dtype == torch.bfloat16
    torch.testing.assert_close(got, want, atol=0.05, rtol=0.05)


@pytest.mark.parametrize("how", ["model", "module", "forward", "attention"])
def test_compiled_models(how: str) -> None:
    model: Any = llama()
    given = model
    if how == "model":
        given = torch.compile(model)
    elif how == "module":
        model.compile()
    elif how == "forward":
        model.forward = torch.compile(model.forward)
    else:
        model.model.layers[0].self_attn.compile()
    with pytest.raises(errors.ParameterError, match=r"a model that is not compiled.*captures decode steps"):
        attach(given).__enter__()


@pytest.mark.parametrize("how", ["model", "module"])
def test_a_model_that_is_compiled_while_attached(how: str) -> None:
    model: Any = llama()
    cache, given = new_cache(model), model
    with attach(model), torch.no_grad():
        want = model(ids()).logits
        if how == "model":
            given = torch.compile(model, backend="eager")
        else:
            model.compile(backend="eager")
        with pytest.raises(errors.ParameterError, match="a forward that is not compiled"):
            given(ids(), **cache_argument(cache))
        assert torch.equal(given(ids()).logits, want) and cache.get_seq_length() == 0

"""A forward pass that ends in the middle, by Ctrl-C or by an error, leaves a cache that can be put right and used again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import kvrecall
from kvrecall.backends.transformers.cache_name import cache_argument
from kvrecall.core import errors
from tests.backends.models import tiny
from tests.backends.test_transformers import METHODS, prompt, ragged, run

HYBRIDS = ("gemma2", "gemma3", "gpt_oss")  # sliding, full, sliding, with windows of 32 tokens
families = pytest.mark.parametrize("family", ["llama", *HYBRIDS])
lengths_ = pytest.mark.parametrize("tokens", [20, 111], ids=["short-of-the-window", "beyond-the-window"])
PLACES = [(layer, part) for layer in range(3) for part in ("before", "after") if (layer, part) != (2, "after")]
places = pytest.mark.parametrize(("layer", "part"), PLACES, ids=[f"{part}-layer-{layer}-stored" for layer, part in PLACES])


@contextmanager
def failing(model: Any, layer: int, part: str, error: type[BaseException] = KeyboardInterrupt) -> Iterator[None]:
    """Raises inside a layer, before or after its attention has stored the new tokens."""

    def stop(*_: object) -> None:
        raise error

    block = model.model.layers[layer]
    module = block if part == "before" else block.mlp
    hook = module.register_forward_pre_hook(stop)
    try:
        yield
    finally:
        hook.remove()


def turn_after(model: Any, first: torch.Tensor, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    ids = torch.cat([first, inputs["input_ids"][:, -9:]], 1)
    grown = torch.ones(ids.shape[0], ids.shape[1] - inputs["input_ids"].shape[1], dtype=torch.int64)
    return {"input_ids": ids, "attention_mask": torch.cat([inputs["attention_mask"], grown], 1)}


@pytest.fixture(scope="module")
def truth() -> dict[tuple[str, int], Any]:
    return {}


def expected(truth: dict, family: str, tokens: int) -> Any:
    """(model, prompt, first answer, second turn, second answer), computed once per family and length."""
    if (family, tokens) not in truth:
        model, inputs = tiny(family), prompt(1, tokens)
        cache = DynamicCache(config=model.config)
        first = run(model, cache, inputs, new_tokens=12)
        turn = turn_after(model, first, inputs)
        truth[family, tokens] = model, inputs, first, turn, run(model, cache, turn, new_tokens=12)
    return truth[family, tokens]


def equal_lengths(cache: kvrecall.RetrievalCache) -> set[int]:
    return {layer.get_seq_length() for layer in cache.layers}


@families
@lengths_
@places
def test_prompt_interrupted_then_aligned(family: str, tokens: int, layer: int, part: str, truth: dict) -> None:
    model, inputs, first, turn, second = expected(truth, family, tokens)
    cache = kvrecall.RetrievalCache(model.config, METHODS["pariskv"])
    with kvrecall.attach(model):
        with failing(model, layer, part), pytest.raises(KeyboardInterrupt):
            run(model, cache, inputs)
        cache.align()
        assert equal_lengths(cache) == {0}
        assert torch.equal(run(model, cache, inputs, new_tokens=12), first)
        assert torch.equal(run(model, cache, turn, new_tokens=12), second)


@families
@lengths_
@places
def test_second_turn_interrupted_then_aligned(family: str, tokens: int, layer: int, part: str, truth: dict) -> None:
    model, inputs, _first, turn, second = expected(truth, family, tokens)
    cache = kvrecall.RetrievalCache(model.config, METHODS["pariskv"])
    with kvrecall.attach(model):
        run(model, cache, inputs, new_tokens=12)
        for _ in range(2):
            with failing(model, layer, part), pytest.raises(KeyboardInterrupt):
                run(model, cache, turn, new_tokens=12)
            cache.align()
            assert equal_lengths(cache) == {tokens + 11}
        assert torch.equal(run(model, cache, turn, new_tokens=12), second)


@families
@lengths_
@pytest.mark.parametrize(("layer", "part"), [(1, "before"), (1, "after"), (2, "before")])
def test_without_align_the_next_call_says_so_once(family: str, tokens: int, layer: int, part: str, truth: dict) -> None:
    """Never a silent wrong answer: the call after the interrupted one raises and mends, the one after that is right."""
    model, inputs, _, turn, second = expected(truth, family, tokens)
    cache = kvrecall.RetrievalCache(model.config, METHODS["pariskv"])
    with kvrecall.attach(model):
        run(model, cache, inputs, new_tokens=12)
        with failing(model, layer, part), pytest.raises(KeyboardInterrupt):
            run(model, cache, turn, new_tokens=12)
        with pytest.raises(errors.KVRecallError, match="interrupted"):
            run(model, cache, turn, new_tokens=12)
        assert torch.equal(run(model, cache, turn, new_tokens=12), second)


@families
def test_ragged_batch_interrupted_in_decoding(family: str) -> None:
    model, inputs = tiny(family), ragged()
    plain = DynamicCache(config=model.config)
    first = run(model, plain, inputs, new_tokens=12)
    turn = turn_after(model, first, inputs)
    second = run(model, plain, turn, new_tokens=12)
    cache = kvrecall.RetrievalCache(model.config, METHODS["pariskv"])
    with kvrecall.attach(model), torch.no_grad():
        run(model, cache, inputs, new_tokens=12)
        with failing(model, 1, "after"), pytest.raises(KeyboardInterrupt):
            model(first[:, -1:], attention_mask=turn["attention_mask"][:, : first.shape[1]], **cache_argument(cache))
        cache.align()
        assert torch.equal(run(model, cache, turn, new_tokens=12), second)


@families
def test_refused_before_anything_is_stored(family: str, monkeypatch: pytest.MonkeyPatch, truth: dict) -> None:
    """Not attached, and no host memory: also the sliding layers in front of the first full one hold nothing then."""
    model, inputs, first, _, _ = expected(truth, family, 111)
    cache = kvrecall.RetrievalCache(model.config, METHODS["pariskv"])
    with pytest.raises(errors.NotAttachedError):
        run(model, cache, inputs)
    assert equal_lengths(cache) == {0}
    monkeypatch.setattr("kvrecall.backends.transformers.cache._CHECKED_TOKENS", 100)
    monkeypatch.setattr("kvrecall.backends.transformers.cache.available_host_bytes", lambda: 1000)
    with kvrecall.attach(model), pytest.raises(errors.HostMemoryError):
        run(model, cache, inputs)
    assert equal_lengths(cache) == {0}
    monkeypatch.undo()
    with kvrecall.attach(model):
        assert torch.equal(run(model, cache, inputs, new_tokens=12), first)


@families
def test_non_finite_keys_in_a_middle_layer(family: str, truth: dict) -> None:
    model, inputs, _, turn, second = expected(truth, family, 111)
    cache = kvrecall.RetrievalCache(model.config, METHODS["pariskv"])

    def spoil(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output.index_fill(-1, torch.tensor([3]), float("nan"))

    with kvrecall.attach(model):
        run(model, cache, inputs, new_tokens=12)
        hook = model.model.layers[1].self_attn.k_proj.register_forward_hook(spoil)
        with pytest.raises(errors.NonFiniteError, match="layer 1, sequence 0"):
            run(model, cache, turn, new_tokens=12)
        hook.remove()
        cache.align()
        assert equal_lengths(cache) == {122}
        assert torch.equal(run(model, cache, turn, new_tokens=12), second)

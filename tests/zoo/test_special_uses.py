"""Uses of a model that are not a plain call of its own `generate`: equal to the same use without kvrecall, or refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import pytest
import torch

import kvrecall
from kvrecall.core.errors import KVRecallError
from tests.zoo.compare import TOLERANCE, ZONES, Turn, answer, difference, holdings, implementations, prompts
from tests.zoo.tiny import AUTO, family, tiny_model

IMAGE_TEXT = list(AUTO)[2]


@pytest.fixture
def llama() -> Any:
    return tiny_model(family("llama"))


def cache_for(config: Any) -> kvrecall.RetrievalCache:
    return kvrecall.RetrievalCache(config, kvrecall.ParisKV(top_k=10_000, **ZONES))


@contextmanager
def refusals(cache: kvrecall.RetrievalCache) -> Iterator[None]:
    """A KVRecallError ends the block, if nothing is stored."""
    try:
        yield
    except KVRecallError:
        assert not any(holdings(cache))


def same_answer(attached: Any, speaking: Any, config: Any) -> None:
    """`speaking.generate` with `attached` attached, against without; also equal or refused."""
    ids, mask = prompts()
    with torch.no_grad():
        wanted = answer(deepcopy(speaking), None, ids, mask)
        cache = cache_for(config)
        with refusals(cache):
            with kvrecall.attach(attached):
                got = answer(speaking, cache, ids, mask, wanted)
            assert difference(got.logits, wanted.logits) < TOLERANCE
            assert cache.stats().total.tokens["retrieval"] > 0


def with_adapters(llama: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(2)
    return get_peft_model(llama, LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)).eval()


def test_peft_model(llama: Any) -> None:
    wrapped = with_adapters(llama)
    same_answer(wrapped, wrapped, wrapped.config)


def test_base_of_a_peft_model_is_attached_and_the_wrapper_speaks(llama: Any) -> None:
    wrapped = with_adapters(llama)
    same_answer(wrapped.get_base_model(), wrapped, llama.config)


@pytest.mark.parametrize("name", ["gemma3", "llava"])
def test_decoder_of_a_vision_model_by_itself(name: str) -> None:
    whole = tiny_model(family(name, IMAGE_TEXT))
    decoder = next(m for n, m in whole.named_modules() if n.endswith("language_model"))
    ids, mask = prompts()
    with torch.no_grad():
        wanted = deepcopy(decoder)(input_ids=ids, attention_mask=mask).last_hidden_state
        cache = cache_for(whole.config)
        before = implementations(whole)
        with refusals(cache):
            with kvrecall.attach(decoder):
                got = [decoder(input_ids=x, attention_mask=mask[:, :n], past_key_values=cache).last_hidden_state
                       for x, n in ((ids[:, :70], 70), (ids[:, 70:], 83))]  # fmt: skip
            real = mask.bool()
            assert difference(torch.cat(got, 1)[real], wanted[real]) < TOLERANCE
        assert implementations(whole) == before


def compiled(llama: Any) -> Any:
    return torch.compile(llama, backend="eager")


def forward_compiled(llama: Any) -> Any:
    llama.forward = torch.compile(llama.forward, backend="eager")
    return llama


@pytest.mark.parametrize("compile", [compiled, forward_compiled])
def test_compiled_model(llama: Any, compile: Callable[[Any], Any]) -> None:
    ids, mask = prompts()
    with torch.no_grad():
        wanted = answer(deepcopy(llama), None, ids, mask)
        cache = cache_for(llama.config)
        with refusals(cache):
            model = compile(llama)
            with kvrecall.attach(model):
                got = answer(model, cache, ids, mask, wanted)
            assert difference(got.logits, wanted.logits) < TOLERANCE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(llama: Any, dtype: torch.dtype) -> None:
    ids, mask = prompts()
    with torch.no_grad():
        exact = answer(deepcopy(llama), None, ids, mask)
        with torch.autocast("cpu", dtype=dtype):
            wanted = answer(deepcopy(llama), None, ids, mask, exact)
        cache = cache_for(llama.config)
        with refusals(cache):
            with torch.autocast("cpu", dtype=dtype), kvrecall.attach(llama):
                got = answer(llama, cache, ids, mask, exact)
            assert rms(got, exact) <= 2 * rms(wanted, exact)


def rms(got: Turn, exact: Turn) -> float:
    return (got.logits - exact.logits).pow(2).mean().sqrt().item()


@pytest.mark.parametrize("ours", [True, False], ids=["with a RetrievalCache", "without"])
def test_training_step(llama: Any, ours: bool) -> None:
    ids, mask = prompts()
    plain = deepcopy(llama).train()
    plain(input_ids=ids, attention_mask=mask, labels=ids).loss.backward()
    given = {"past_key_values": cache_for(llama.config)} if ours else {}
    try:
        with kvrecall.attach(llama.train()):
            llama(input_ids=ids, attention_mask=mask, labels=ids, **given).loss.backward()
    except KVRecallError:
        assert ours  # the forward pass may stand: only a backward pass that lacks gradients would be wrong
        return
    for wanted, got in zip(plain.parameters(), llama.parameters(), strict=True):
        torch.testing.assert_close(got.grad, wanted.grad, atol=1e-5, rtol=1e-3)

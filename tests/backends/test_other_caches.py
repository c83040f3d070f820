"""Inside `attach`, whatever is not a RetrievalCache gets the attention it gets outside: same tokens, same logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache

import kvrecall
from kvrecall.backends.transformers.cache_name import cache_argument
from tests.backends.models import tiny
from tests.backends.test_transformers import prompt, ragged, run

FAMILIES = ("llama", "mistral", "gemma2", "gemma3", "gpt_oss")
families = pytest.mark.parametrize("family", FAMILIES)
both_inputs = pytest.mark.parametrize("inputs", [prompt(), ragged()], ids=["even", "ragged"])


def logits_of_two_chunks(model: Any, inputs: dict[str, torch.Tensor], first: int) -> torch.Tensor:
    """A prompt in two forward passes over one DynamicCache, then one token more."""
    cache, outs = DynamicCache(config=model.config), []
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    for start, end in ((0, first), (first, ids.shape[1] - 1), (ids.shape[1] - 1, ids.shape[1])):
        outs.append(model(ids[:, start:end], attention_mask=mask[:, :end], **cache_argument(cache)).logits)
    # What padding tokens compute is nobody's business.
    return torch.where(mask.bool().unsqueeze(-1), torch.cat(outs, 1), 0.0)


@families
@both_inputs
@pytest.mark.parametrize("first", [1, 20, 37, 109])
@torch.no_grad()
def test_chunks_after_what_is_cached(family: str, inputs: dict[str, torch.Tensor], first: int) -> None:
    """Several queries behind cached keys: the causal mask must be aligned with the last key, not with the first."""
    model = tiny(family)
    expected = logits_of_two_chunks(model, inputs, first)
    with kvrecall.attach(model):
        torch.testing.assert_close(logits_of_two_chunks(model, inputs, first), expected, atol=1e-4, rtol=1e-4)


@families
@both_inputs
def test_second_turn_of_a_dynamic_cache(family: str, inputs: dict[str, torch.Tensor]) -> None:
    def turns(model: Any) -> torch.Tensor:
        cache = DynamicCache(config=model.config)
        answer = run(model, cache, inputs, new_tokens=8)
        ids = torch.cat([answer, inputs["input_ids"][:, -13:]], 1)
        grown = torch.ones(ids.shape[0], ids.shape[1] - inputs["input_ids"].shape[1], dtype=torch.int64)
        turn = {"input_ids": ids, "attention_mask": torch.cat([inputs["attention_mask"], grown], 1)}
        return run(model, cache, turn, new_tokens=8)

    model = tiny(family)
    expected = turns(model)
    with kvrecall.attach(model):
        assert torch.equal(turns(model), expected)


@families
@pytest.mark.parametrize("call", [{"prefill_chunk_size": 37}, {"num_beams": 2}], ids=["chunked-prefill", "beams"])
def test_ways_to_generate(family: str, call: dict[str, Any]) -> None:
    model = tiny(family)
    expected = run(model, DynamicCache(config=model.config), prompt(), **call)
    with kvrecall.attach(model):
        assert torch.equal(run(model, DynamicCache(config=model.config), prompt(), **call), expected)


@families
@torch.no_grad()
def test_no_cache_and_gradients(family: str) -> None:
    """Attached models may still be trained: without a cache, gradients flow as they do outside."""
    model, inputs = tiny(family), ragged()
    grads = []
    for attached in (False, True):
        model.zero_grad()
        with torch.enable_grad():
            if attached:
                with kvrecall.attach(model):
                    out = model(**inputs, use_cache=False).logits
            else:
                out = model(**inputs, use_cache=False).logits
            (out * inputs["attention_mask"].unsqueeze(-1)).square().sum().backward()
        grads.append(model.model.layers[1].self_attn.k_proj.weight.grad.clone())
    torch.testing.assert_close(grads[1], grads[0], atol=1e-3, rtol=1e-3)

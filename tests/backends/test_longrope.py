"""Longrope models turn keys by factors that follow from a text's final length: an answer has those of its own length."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import kvrecall
from kvrecall import engine
from kvrecall.backends.transformers.cache_name import cache_argument
from kvrecall.backends.transformers.generating import shared_tokens
from tests.backends.models import tiny
from tests.backends.test_rotary import made
from tests.one_layer import ZONES

SWITCH = 64
METHOD = kvrecall.Exact(top_k=4096, **ZONES)


@pytest.fixture(scope="module")
def model() -> Any:
    return made("phi3 longrope", num_hidden_layers=2, original_max_position_embeddings=SWITCH)


def ids(tokens: int, seed: int = 1) -> Tensor:
    return torch.randint(3, 320, (1, tokens), generator=torch.Generator().manual_seed(seed))


def generate(model: Any, cache: Any, prompt: Tensor, tokens: int, **given: Any) -> Tensor:
    with kvrecall.attach(model):
        return model.generate(
            prompt, **cache_argument(cache), max_new_tokens=tokens, do_sample=False, pad_token_id=0, eos_token_id=None, **given
        )


def new(model: Any) -> kvrecall.RetrievalCache:
    return kvrecall.RetrievalCache(model.config, METHOD)


def test_a_short_text_after_a_long_one_has_short_factors(model: Any) -> None:
    cache, short = new(model), torch.cat([ids(40)[:, :30], ids(3, seed=2)], 1)
    generate(model, cache, ids(40), 40)
    with pytest.warns(RuntimeWarning):
        answer = generate(model, cache, short, 8)
    assert torch.equal(answer, generate(model, new(model), short, 8))


@pytest.mark.parametrize("reserved", [0, 200])
def test_a_second_turn_may_grow_beyond_the_switch(model: Any, reserved: int) -> None:
    cache = new(model)
    turn = torch.cat([generate(model, cache, ids(40), 5), ids(3, seed=2)], 1)
    if reserved:
        cache.reserve(reserved)
    assert torch.equal(generate(model, cache, turn, 40), generate(model, new(model), turn, 40))


def test_an_announced_length_holds_for_the_turns_before_it(model: Any) -> None:
    cache, alone = new(model), new(model)
    for each in (cache, alone):
        each.reserve(200)
    turn = torch.cat([generate(model, cache, ids(40), 5), ids(3, seed=2)], 1)
    assert cache.long_factors
    assert torch.equal(generate(model, cache, turn, 5), generate(model, alone, turn, 5)) and cache.long_factors


def test_drafts_may_grow_beyond_the_switch(model: Any) -> None:
    answer = generate(model, new(model), ids(40), 40, prompt_lookup_num_tokens=3)
    assert torch.equal(answer, generate(model, new(model), ids(40), 40))


def test_prompts_share_no_keys_with_other_factors(model: Any) -> None:
    cache, prompt = new(model), ids(50)
    engine.prefill(model, prompt, cache)
    assert shared_tokens(cache, ids(55, seed=3), 60) == 0, "another text"
    longer = torch.cat([prompt, ids(5, seed=2)], 1)
    assert shared_tokens(cache, longer, SWITCH) == 50 and shared_tokens(cache, longer, SWITCH + 1) == 0


def test_a_text_whose_factors_change_with_every_token_shares_nothing() -> None:
    rope = {"rope_theta": 10000.0, "rope_type": "dynamic", "factor": 4.0}
    model = tiny("llama", num_hidden_layers=2, rope_parameters=rope)
    cache, prompt = new(model), ids(50)
    engine.prefill(model, prompt, cache)
    assert shared_tokens(cache, torch.cat([prompt, ids(5, seed=2)], 1), 60) == 0

"""Prompt look-up in the loop: the answers of `model.generate`, and greedy ones those of plain decoding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import kvrecall
from kvrecall import engine
from kvrecall.core.errors import ParameterError
from tests.backends.models import tiny
from tests.backends.test_transformers import METHODS as COVERING
from tests.engine.test_decoding import plain
from tests.engine.users import METHODS as SPARSE
from tests.engine.users import User, in_threads

FAMILIES = ("llama", "gemma2", "gemma3", "gpt_oss")


def text(tokens: int = 150, seed: int = 3) -> Tensor:
    """Of many tokens, so that a token that is drawn often stood there before."""
    return torch.randint(3, 320, (1, tokens), generator=torch.Generator().manual_seed(seed))


def widths(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by the number of tokens of each call of the model."""
    seen: list[int] = []
    forward = model.forward

    def watched(*args: Any, **kwargs: Any) -> Any:
        seen.append(kwargs["input_ids"].shape[1])
        return forward(*args, **kwargs)

    monkeypatch.setattr(model, "forward", watched)
    return seen


@pytest.mark.parametrize("method", SPARSE)
def test_the_greedy_answer_is_the_plain_one_in_fewer_calls(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = tiny("llama"), text()
    caches = [kvrecall.RetrievalCache(model.config, SPARSE[method]) for _ in range(2)]
    expected = engine.generate(model, None, ids, caches[0], max_new_tokens=40, chunk_tokens=64)
    calls = widths(model, monkeypatch)
    made = engine.generate(model, None, ids, caches[1], max_new_tokens=40, chunk_tokens=64, prompt_lookup_num_tokens=5)
    assert torch.equal(made.sequences, expected.sequences)
    assert len([count for count in calls if count <= 6]) < 39 and max(count for count in calls if count < 22) == 6
    assert caches[1].get_seq_length() == caches[0].get_seq_length() == 189
    for ours, theirs in zip(caches[1].retrieval_layers, caches[0].retrieval_layers, strict=True):
        assert ours.state is not None and theirs.state is not None
        assert ours.state.store.zones(0) == theirs.state.store.zones(0)


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_those_of_transformers(family: str, sampled: bool) -> None:
    model, ids = tiny(family), text()
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    how: dict[str, Any] = {"do_sample": True, "temperature": 1.2, "top_p": 0.9, "top_k": 0} if sampled else {"do_sample": False}
    expected = plain(model, inputs, COVERING["full"], 4, max_new_tokens=30, prompt_lookup_num_tokens=4, pad_token_id=0, **how)
    given = {"temperature": 1.2, "top_p": 0.9, "seed": 4} if sampled else {}
    cache = kvrecall.RetrievalCache(model.config, COVERING["full"])
    made = engine.generate(model, None, ids, cache, max_new_tokens=30, prompt_lookup_num_tokens=4, **given)
    assert torch.equal(made.sequences, expected)
    assert not any(getattr(layer, "record_past", False) for layer in cache.layers)


HONOURED: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.7},
    "ngrams": {"no_repeat_ngram_size": 3},
    "suppressed": {"suppress_tokens": list(range(0, 320, 2))},
    "at-least": {"min_new_tokens": 9, "eos_token_id": list(range(0, 320, 3))},
    "ends": {"eos_token_id": list(range(0, 30))},
    "longer-matches": {"max_matching_ngram_size": 3},
}


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", HONOURED)
def test_the_model_s_generation_config_holds(name: str, sampled: bool) -> None:
    """And may itself ask for the look-up."""
    model, ids = tiny("llama"), text()
    model.generation_config.update(pad_token_id=0, prompt_lookup_num_tokens=3, **HONOURED[name])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    how: dict[str, Any] = {"do_sample": True, "temperature": 1.2, "top_p": 0.9, "top_k": 0} if sampled else {"do_sample": False}
    expected = plain(model, inputs, COVERING["full"], 4, max_new_tokens=20, **how)
    given = {"temperature": 1.2, "top_p": 0.9, "seed": 4} if sampled else {}
    assert torch.equal(engine.generate(model, None, ids, COVERING["full"], max_new_tokens=20, **given).sequences, expected)


@pytest.mark.parametrize("method", ["pariskv", "louiskv"])
def test_several_turns_beside_other_requests(method: str) -> None:
    """Requests that look up and others, some joined, each with its own cache, over two turns."""
    model = tiny("llama")
    users = [User(SPARSE[method], seed=n, new_tokens=20, more={"temperature": 0.0}) for n in range(4)]
    guessing = {"prompt_lookup_num_tokens": 4}

    def turns(one: User, look_up: bool, ask: Callable[..., engine.GenerateResult]) -> list[list[int]]:
        cache, ids, answers = kvrecall.RetrievalCache(model.config, one.method), one.ids, []
        for turn in range(2):
            made = ask(ids, cache, **(guessing if look_up else {}))
            answers += made.new_tokens
            ids = torch.cat([made.sequences, text(3, 10 * one.seed + turn)], 1)
        return answers

    def ask(ids: Tensor, cache: kvrecall.RetrievalCache, **more: Any) -> engine.GenerateResult:
        return engine.Engine.of(model).submit(None, ids, cache, max_new_tokens=20, chunk_tokens=32, **more).result()

    expected = [turns(one, False, ask) for one in users]
    made = in_threads([lambda one=one: turns(one, one.seed % 2 == 0, ask) for one in users])
    assert made == expected


def test_tokens_are_told_one_by_one_and_an_answer_ends_where_it_is_told_to() -> None:
    model, ids, told = tiny("llama"), text(), []
    whole = engine.generate(model, None, ids, COVERING["full"], max_new_tokens=30).new_tokens[0]
    for end in (1, 7, 30):
        told.clear()
        made = engine.generate(
            model, None, ids, COVERING["full"], max_new_tokens=end, on_token=told.append, prompt_lookup_num_tokens=7
        )
        assert made.new_tokens[0] == whole[:end] and told == list(range(1, end + 1))


def test_a_request_that_is_cancelled_leaves_whole_tokens() -> None:
    model, ids = tiny("llama"), text()
    cache = kvrecall.RetrievalCache(model.config, SPARSE["pariskv"])
    expected = engine.generate(model, None, ids, SPARSE["pariskv"], max_new_tokens=30).new_tokens
    request = engine.Engine.of(model).submit(None, ids, cache, max_new_tokens=30, prompt_lookup_num_tokens=4)
    for number, _ in enumerate(request):
        if number == 9:
            break
    request.cancel()
    held = cache.tokens.ids()
    assert held is not None and held.shape[1] == cache.get_seq_length() >= 159
    assert held[0, 150:].tolist() == expected[0][: held.shape[1] - 150]
    again = engine.generate(model, None, ids, cache, max_new_tokens=30, prompt_lookup_num_tokens=4)
    assert len(again.new_tokens[0]) == 30


@pytest.mark.parametrize(("given", "name"), [
    ({"prompt_lookup_num_tokens": 8}, "prompt_lookup_num_tokens.*1 to 7, got 8"),
    ({"prompt_lookup_num_tokens": 0}, "prompt_lookup_num_tokens.*got 0"),
    ({"prompt_lookup_num_tokens": 2, "input_ids": text().repeat(2, 1)}, "prompt_lookup_num_tokens.*2 prompts"),
], ids=["too-many", "none", "batch"])  # fmt: skip
def test_what_cannot_be_looked_up_is_refused(given: dict[str, Any], name: str) -> None:
    model = tiny("llama")
    cache = kvrecall.RetrievalCache(model.config, SPARSE["pariskv"])
    with pytest.raises(ParameterError, match=name):
        engine.generate(model, None, given.pop("input_ids", text()), cache, max_new_tokens=5, **given)
    assert cache.get_seq_length() == 0

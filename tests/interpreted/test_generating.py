"""`model.generate` inside `attach` replays captured steps where it can, and is itself everywhere else."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import kvrecall
from kvrecall import engine
from kvrecall.backends.transformers.cache_name import cache_argument
from tests.backends.models import tiny

pytest.importorskip("triton", reason="Triton is only there on Linux")
from kvrecall.backends.transformers import generating
from kvrecall.backends.transformers.capture.calls import captured_decoding
from tests.interpreted.launched import Launched, without_gpu
from tests.interpreted.test_recorded import METHODS, SMALL, prompt

pytestmark = pytest.mark.usefixtures("several_blocks")


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    without_gpu(monkeypatch)
    monkeypatch.setattr(generating, "_may_capture", lambda: True)
    monkeypatch.setattr(Launched, "recorded_steps", 0)


@pytest.fixture
def model() -> Any:
    made = tiny("llama", **SMALL)
    made.generation_config.eos_token_id = None
    return made


def answer(model: Any, ids: Tensor, capture: bool = True, cache: Any = None, **options: Any) -> Tensor:
    cache = kvrecall.RetrievalCache(model.config, METHODS["sphere"]) if cache is None else cache
    torch.manual_seed(3)
    with kvrecall.attach(model, capture=capture):
        return model.generate(ids, **cache_argument(cache), **{"max_new_tokens": 5, "do_sample": False} | options)


@pytest.mark.parametrize("options", [{}, {"do_sample": True, "top_k": 20}, {"num_return_sequences": 2, "do_sample": True}])
def test_later_calls_replay_what_the_first_one_recorded(options: dict[str, Any], model: Any) -> None:
    for seed in range(2):
        ids = prompt(40, seed=seed)
        expected = answer(model, ids, capture=False, **options)
        assert not seed or Launched.recorded_steps == 1
        assert torch.equal(answer(model, ids, **options), expected)
    assert Launched.recorded_steps == 1 and "generate" not in vars(model) and "forward" not in vars(model)


def test_padded_prompts_and_a_second_turn(model: Any) -> None:
    ids, mask = prompt(40, 2), torch.ones(2, 40, dtype=torch.int64)
    mask[1, :7] = 0
    outs = []
    for capture in (False, True):
        cache = kvrecall.RetrievalCache(model.config, METHODS["sphere"])
        first = answer(model, ids, capture, cache, attention_mask=mask)
        more = torch.cat([first, prompt(9, 2, seed=8)], 1)
        whole = torch.cat([mask, mask.new_ones(2, more.shape[1] - 40)], 1)
        outs.append(answer(model, more, capture, cache, attention_mask=whole))
    assert torch.equal(*outs) and Launched.recorded_steps > 0


@pytest.mark.parametrize("options", [
    {"num_beams": 2}, {"prompt_lookup_num_tokens": 2}, {"output_hidden_states": True, "return_dict_in_generate": True},
    {"use_cache": True, "output_attentions": False, "num_beams": 3},
], ids=str)  # fmt: skip
def test_what_a_recorded_step_does_not_give_is_uncaptured(options: dict[str, Any], model: Any) -> None:
    made, expected = (answer(model, prompt(40), capture, **options) for capture in (True, False))
    if "output_hidden_states" in options:
        assert len(made.hidden_states) == 5 and made.hidden_states[-1][-1].shape[1] == 1  # type: ignore[attr-defined]
        made, expected = made.sequences, expected.sequences  # type: ignore[attr-defined]
    assert torch.equal(made, expected) and Launched.recorded_steps == 0


def test_positions_that_ids_do_not_tell_are_the_models(model: Any) -> None:
    """Of a prompt that came as embeddings, and of positions with several axes."""
    embeds = model.get_input_embeddings()(prompt(40)).detach()
    cache = kvrecall.RetrievalCache(model.config, METHODS["sphere"])
    with kvrecall.attach(model):
        made = model.generate(inputs_embeds=embeds, **cache_argument(cache), max_new_tokens=5, do_sample=False)
    assert torch.equal(made, answer(model, prompt(40), capture=False)[:, 40:]) and Launched.recorded_steps == 0
    with kvrecall.attach(model):
        model(prompt(40), **cache_argument(cache := kvrecall.RetrievalCache(model.config, METHODS["sphere"])))
    model.forward = lambda **given: "the model's own"
    with captured_decoding(model, cache, 4, required=True):
        several = torch.full((3, 1, 1), 40)
        assert model.forward(input_ids=prompt(1), **cache_argument(cache), position_ids=several) == "the model's own"
    assert Launched.recorded_steps == 0 and not cache.captured


def test_steps_that_somebody_watches_are_uncaptured(model: Any) -> None:
    cache, seen = kvrecall.RetrievalCache(model.config, METHODS["sphere"]), []
    cache.on_queries = lambda number, queries: seen.append(queries.shape[2])
    answer(model, prompt(40), cache=cache)
    assert seen == [40, 1, 1, 1, 1] and Launched.recorded_steps == 0


def test_calls_without_a_retrieval_cache_are_the_models_own(model: Any) -> None:
    expected = model.generate(prompt(40), max_new_tokens=4, do_sample=False)
    with kvrecall.attach(model):
        assert torch.equal(model.generate(prompt(40), max_new_tokens=4, do_sample=False), expected)


def test_memory_that_is_refused_leaves_uncaptured_steps(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = answer(model, prompt(40), capture=False)

    def refuse(*_: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(Launched, "_record", refuse)
    assert torch.equal(answer(model, prompt(40)), expected)


def test_a_copy_of_an_attached_model_generates_itself(model: Any) -> None:
    with kvrecall.attach(model):
        other = copy.deepcopy(model)
    with torch.no_grad():
        other.lm_head.weight.neg_()
    made, own = (each.generate(prompt(40), max_new_tokens=4, do_sample=False) for each in (other, model))
    assert not torch.equal(made, own)
    with torch.no_grad():
        other.lm_head.weight.neg_()
    assert torch.equal(other.generate(prompt(40), max_new_tokens=4, do_sample=False), own)


def test_contexts_that_overlap_leave_the_model_as_it_was(model: Any) -> None:
    """Of two caches, whichever ends first; each replays its own steps."""
    caches = [kvrecall.RetrievalCache(model.config, METHODS["sphere"]) for _ in range(4)]
    with kvrecall.attach(model, capture=False):
        for cache in caches:
            model(prompt(40), **cache_argument(cache))
        ones = [captured_decoding(model, cache, 4, required=True) for cache in caches[:2]]
        for one in ones:
            one.__enter__()
        for number, one in enumerate(ones):
            made, expected = (
                model(input_ids=prompt(1, seed=number), **cache_argument(x)).logits for x in (caches[1], caches[3])
            )
            torch.testing.assert_close(made, expected, atol=2e-5, rtol=2e-5)
            if not number:
                model(input_ids=prompt(1), **cache_argument(caches[0]))
            assert caches[1].captured and caches[0].captured != bool(number) and not caches[3].captured
            one.__exit__(None, None, None)
    assert "forward" not in vars(model) and not any(cache.captured for cache in caches)


def test_the_engine_is_not_captured_twice(model: Any) -> None:
    ids = prompt(40)
    expected = answer(model, ids, capture=False)
    with kvrecall.attach(model):
        made = engine.generate(model, None, ids, METHODS["sphere"], max_new_tokens=5)
    assert torch.equal(made.sequences, expected)

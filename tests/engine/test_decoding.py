"""Between two steps of a request: processors, criteria, ends and the model's own config, as in `model.generate`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GenerationConfig

import kvrecall
from kvrecall import ask, engine
from kvrecall.backends.transformers.cache_name import cache_argument
from kvrecall.core.errors import ParameterError
from tests.backends.models import tiny
from tests.backends.test_transformers import METHODS, prompt, ragged
from tests.engine.users import METHODS as SPARSE
from tests.engine.users import in_threads
from tests.tiny import byte_tokenizer

HONOURED: dict[str, dict[str, Any]] = {
    "nothing": {},
    "repetition": {"repetition_penalty": 1.7},
    "ngrams": {"no_repeat_ngram_size": 2},
    "suppressed": {"suppress_tokens": list(range(0, 320, 2))},
    "suppressed-first": {"begin_suppress_tokens": list(range(300))},
    "bad-words": {"bad_words_ids": [[n] for n in range(100, 320)]},
    "at-least": {"min_new_tokens": 9, "eos_token_id": list(range(0, 320, 3))},
    "forced-end": {"forced_eos_token_id": 7},
    "ends": {"eos_token_id": [*range(0, 60), 319]},
    "bias": {"sequence_bias": [[[11], 4.0]]},
    "guided": {"guidance_scale": 1.5},
    "typical": {"typical_p": 0.5, "min_p": 0.001},
    "watermark": {"watermarking_config": {"greenlist_ratio": 0.3, "bias": 3.0}},
}


def plain(model: Any, inputs: dict[str, torch.Tensor], method: kvrecall.Method, seed: int, **asked: Any) -> torch.Tensor:
    """transformers' own loop over the same kind of cache."""
    cache = kvrecall.RetrievalCache(model.config, method)
    with kvrecall.attach(model), torch.random.fork_rng():
        torch.manual_seed(seed)
        return model.generate(**inputs, **cache_argument(cache), generation_config=GenerationConfig(**asked))


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", HONOURED)
def test_the_model_s_generation_config_holds(name: str, sampled: bool) -> None:
    model = tiny("llama")
    model.generation_config.update(**HONOURED[name])
    model.generation_config.pad_token_id = 0
    how: dict[str, Any] = {"do_sample": True, "temperature": 1.2, "top_p": 0.9, "top_k": 0} if sampled else {"do_sample": False}
    for inputs in (prompt(1, 40), ragged((40, 7))):
        expected = plain(model, inputs, METHODS["full"], 4, max_new_tokens=15, **how)
        given = {"temperature": 1.2, "top_p": 0.9, "seed": 4} if sampled else {}
        made = engine.generate(
            model, None, inputs["input_ids"], METHODS["full"], max_new_tokens=15, attention_mask=inputs["attention_mask"],
            **given,
        )  # fmt: skip
        assert torch.equal(made.sequences, expected)


@pytest.mark.parametrize("name", SPARSE)
def test_retrieval_decodes_as_in_transformers_own_loop(name: str) -> None:
    model, inputs = tiny("llama"), ragged((70, 33))
    how: dict[str, Any] = {"do_sample": True, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "pad_token_id": 0}
    expected = plain(model, inputs, SPARSE[name], 8, max_new_tokens=15, **how)
    made = engine.generate(
        model, None, inputs["input_ids"], SPARSE[name], max_new_tokens=15, attention_mask=inputs["attention_mask"],
        temperature=1.0, seed=8, chunk_tokens=999,
    )  # fmt: skip
    assert torch.equal(made.sequences, expected)


def test_processors_are_those_of_each_request() -> None:
    """Penalties look at the ids of their own request, also where steps are shared."""
    model = tiny("llama")
    model.generation_config.update(repetition_penalty=1.9, no_repeat_ngram_size=2)
    ids = [torch.randint(3, 320, (1, 30 + 9 * n), generator=torch.Generator().manual_seed(n)) for n in range(3)]
    expected = [engine.generate(model, None, one, METHODS["full"], max_new_tokens=25).new_tokens for one in ids]
    submit = engine.Engine.of(model).submit
    requests = [submit(None, one, METHODS["full"], max_new_tokens=25) for one in ids]
    assert [result.new_tokens for result in in_threads([request.result for request in requests])] == expected


@pytest.mark.parametrize(("setting", "name"), [
    ({"num_beams": 3}, "generation_config.*beam_search"), ({"assistant_early_exit": 2}, "assisted_generation"),
    ({"num_return_sequences": 2, "do_sample": True}, "num_return_sequences"), ({"use_cache": False}, "use_cache"),
], ids=["beams", "assisted", "several-answers", "no-cache"])  # fmt: skip
def test_what_the_model_asks_for_and_no_step_can_give_is_refused(setting: dict[str, Any], name: str) -> None:
    model = tiny("llama")
    cache = kvrecall.RetrievalCache(model.config, METHODS["full"])
    model.generation_config.update(**setting)
    with pytest.raises(ParameterError, match=name):
        engine.generate(model, None, prompt(1, 40)["input_ids"], cache, max_new_tokens=5, chunk_tokens=10)
    assert cache.get_seq_length() == 0


def test_what_transformers_refuses_fails_that_request() -> None:
    model = tiny("llama")
    ids = prompt(1, 40)["input_ids"]
    cache = kvrecall.RetrievalCache(model.config, METHODS["full"])
    model.generation_config.update(stop_strings=["x"])
    with pytest.raises(ValueError, match="stop strings"):
        engine.generate(model, None, ids, cache, max_new_tokens=5)
    model.generation_config.stop_strings = None
    assert len(engine.generate(model, None, ids, cache, max_new_tokens=5).new_tokens[0]) == 5


def test_stop_strings_and_cache_names_of_the_generation_config() -> None:
    """The tokenizer is there for the strings, and the cache is the one that is given."""
    model, tokenizer, ids = tiny("llama", vocab_size=256), byte_tokenizer(), prompt(1, 40)["input_ids"] % 256
    whole = engine.generate(model, tokenizer, ids, METHODS["full"], max_new_tokens=8).new_tokens[0]
    stop = tokenizer.convert_tokens_to_string([tokenizer.convert_ids_to_tokens(whole[3])])
    model.generation_config.update(stop_strings=[stop], cache_implementation="static", pad_token_id=0)
    expected = model.generate(ids, max_new_tokens=8, do_sample=False, tokenizer=tokenizer, cache_implementation="dynamic")
    made = engine.generate(model, tokenizer, ids, METHODS["full"], max_new_tokens=8)
    assert torch.equal(made.sequences, expected) and len(made.new_tokens[0]) < 8
    answer = ask(model, tokenizer, "the red boat " * 9, "red?", method=METHODS["full"], max_new_tokens=8)
    assert 1 <= len(answer[0].tokens) <= 8


def test_a_time_limit_holds() -> None:
    model = tiny("llama")
    model.generation_config.max_time = 1e-9
    made = engine.generate(model, None, prompt(1, 40)["input_ids"], METHODS["full"], max_new_tokens=50)
    assert len(made.new_tokens[0]) == 1

"""Rotary embeddings that change with the length: chunks are as the prompt read at once; context limits are scaled."""

from __future__ import annotations

from copy import deepcopy
from functools import cache as once
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, Phi3Config, Qwen2Config

import kvrecall
from kvrecall import engine
from kvrecall.backends.transformers.cache_name import cache_argument
from kvrecall.backends.transformers.families import context_limit
from kvrecall.cache.session_folder import read_index, write_index
from kvrecall.core import errors
from kvrecall.core.private_folder import PrivateFolder
from kvrecall.engine.document import Document
from tests.backends.models import ROPE, SMALL, tiny
from tests.tiny import word_tokenizer

SWITCH, NEW = 60, 6
LONG = ROPE | {
    "rope_type": "longrope", "original_max_position_embeddings": SWITCH, "short_factor": [1.0] * 32, "long_factor": [4.0] * 32,
}  # fmt: skip
METHODS = {
    "full": kvrecall.Full(),
    "pariskv": kvrecall.ParisKV(top_k=10_000, sink_tokens=4, local_tokens=16, update_interval=8, full_attention_threshold=0),
}


@once
def made(name: str) -> Any:
    """Sharp attention, which notices the positions."""
    if name == "phi3":
        import transformers

        torch.manual_seed(0)
        config = Phi3Config(**SMALL | {"hidden_size": 256}, original_max_position_embeddings=SWITCH, rope_parameters=dict(LONG))
        model: Any = transformers.Phi3ForCausalLM(config).eval()
        model.generation_config.eos_token_id = None
    else:
        changes = {
            "llama": {"rope_parameters": LONG | {"factor": 4.0}},
            "dynamic": {"rope_parameters": ROPE | {"rope_type": "dynamic", "factor": 8.0}, "max_position_embeddings": SWITCH},
            "yarn": {"rope_parameters": ROPE | {"rope_type": "yarn", "factor": 8.0}, "max_position_embeddings": SWITCH},
        }[name]
        model = tiny("llama", **changes)
    for layer in model.model.layers:
        attention = layer.self_attn
        for part in [attention.qkv_proj] if name == "phi3" else [attention.q_proj, attention.k_proj]:
            part.weight.data *= 8
    return model


def model_of(name: str) -> Any:
    """A fresh one: dynamic embeddings remember the longest text of plain calls."""
    return deepcopy(made(name))


def prompt(tokens: int) -> Tensor:
    return torch.randint(3, 320, (1, tokens), generator=torch.Generator().manual_seed(1))


def generated(model: Any, ids: Tensor, cache: Any = None) -> list[int]:
    given = {} if cache is None else cache_argument(cache)
    made = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, pad_token_id=0, **given
    )
    return made[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("name", ["phi3", "llama", "dynamic", "yarn"])
@pytest.mark.parametrize("tokens", [50, 130], ids=["short", "long"])
@pytest.mark.parametrize("method", METHODS)
def test_chunks_are_the_prompt_read_at_once(name: str, tokens: int, method: str) -> None:
    ids = prompt(tokens)
    wanted = generated(model_of(name), ids)
    model = model_of(name)
    generated(model, prompt(200))  # a longer text before changes nothing
    for chunk in (512, 40, 9):
        result = engine.generate(model, None, ids, METHODS[method], max_new_tokens=NEW, chunk_tokens=chunk)
        assert result.new_tokens == [wanted] and result.cache.get_seq_length() == tokens + NEW - 1
    cache = kvrecall.RetrievalCache(model.config, METHODS[method])
    with kvrecall.attach(model):
        assert generated(model, ids, cache) == wanted
    assert cache.get_seq_length() == tokens + NEW - 1 and not {"forward", "prepare_inputs_for_generation"} & set(vars(model))
    assert generated(model_of(name), ids) == wanted  # outside everything is as it was


@pytest.mark.parametrize("name", ["phi3", "llama"])
def test_an_answer_that_grows_beyond_the_short_factors(name: str) -> None:
    """`generate` knows the final length before; calls of the model are refused where the factors would be mixed."""
    model, ids = model_of(name), prompt(SWITCH - 2)
    cache = kvrecall.RetrievalCache(model.config, kvrecall.Full())
    expected = f"at most {SWITCH} tokens behind keys whose rotary embedding is for texts up to that length, got {SWITCH + 7}"
    with kvrecall.attach(model), torch.no_grad():
        model(input_ids=ids, **cache_argument(cache))
        with pytest.raises(errors.ParameterError, match=expected):
            model(input_ids=prompt(9), **cache_argument(cache))
    assert cache.get_seq_length() == SWITCH - 2
    answers = {
        chunk: engine.generate(model, None, ids, kvrecall.Full(), max_new_tokens=NEW, chunk_tokens=chunk) for chunk in (9, 99)
    }
    assert answers[9].new_tokens == answers[99].new_tokens and answers[9].cache.long_factors
    assert engine.generate(model, None, ids, cache, max_new_tokens=NEW).new_tokens == answers[9].new_tokens  # read again
    with kvrecall.attach(model):
        assert generated(model, ids, kvrecall.RetrievalCache(model.config, kvrecall.Full())) == answers[9].new_tokens[0]


@pytest.mark.parametrize("tokens", [30, 55, 130])
def test_questions_about_a_document(tokens: int) -> None:
    model, tokenizer = model_of("phi3"), word_tokenizer(320)
    document = Document.of(model, tokenizer, " ".join(f"w{i}" for i in prompt(tokens)[0].tolist()), method=kvrecall.Full())
    question = "w17 w40 w33 w5"
    (made,) = document.ask(question, max_new_tokens=NEW, chunk_tokens=20)
    whole = torch.tensor([document.prompt.ask(question)])
    assert bool(document.cache.long_factors) == (whole.shape[1] + NEW > SWITCH)
    if not SWITCH - NEW < whole.shape[1] <= SWITCH:  # else transformers changes the factors within the answer
        assert made.tokens == generated(model_of("phi3"), whole)[: len(made.tokens)]


def test_sessions_know_their_factors(tmp_path: Path) -> None:
    model, ids = model_of("llama"), prompt(130)
    cache = kvrecall.RetrievalCache(model.config, kvrecall.Full())
    engine.prefill(model, ids[:, :40], cache, expect_tokens=200)
    cache.save(tmp_path / "session")
    loaded = kvrecall.RetrievalCache.load(tmp_path / "session", model.config, model=model)
    assert loaded.long_factors
    assert engine.generate(model, None, ids, loaded, max_new_tokens=NEW, chunk_tokens=30).new_tokens == [generated(model, ids)]


YARN = {"rope_type": "yarn", "factor": 4.0}
LIMITS: dict[str, tuple[Any, dict[str, Any], int]] = {
    "YaRN as on Qwen2.5's card": (Qwen2Config, YARN | {"original_max_position_embeddings": 512}, 2048),
    "YaRN with the scaled length": (LlamaConfig, YARN | {"original_max_position_embeddings": 128}, 512),
    "linear": (LlamaConfig, {"rope_type": "linear", "factor": 4.0}, 2048),
    "dynamic": (LlamaConfig, {"rope_type": "dynamic", "factor": 3.0}, 1536),
    "llama3, whose length is the scaled one": (
        LlamaConfig,
        {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        512,
    ),
    "none": (LlamaConfig, {"rope_type": "default"}, 512),
}  # fmt: skip


@pytest.mark.parametrize("name", LIMITS)
def test_the_context_limit_is_the_scaled_length(name: str) -> None:
    kind, rope, limit = LIMITS[name]
    assert context_limit(kind(max_position_embeddings=512, rope_parameters={"rope_theta": 1e4} | rope)) == limit


def test_the_scaled_context_is_used_up_to_its_end_and_no_further() -> None:
    model, ids = model_of("yarn"), prompt(130)
    with pytest.raises(errors.ContextLengthError, match="at most 480 tokens, got 490"):
        engine.generate(model, None, prompt(470), kvrecall.Full(), max_new_tokens=20)
    assert engine.generate(model, None, ids, kvrecall.Full(), max_new_tokens=NEW).new_tokens == [generated(model, ids)]


@pytest.mark.parametrize("tokens", [40, 100])
def test_a_session_of_a_release_without_factors(tokens: int, tmp_path: Path) -> None:
    """A short one has the short factors; of a longer one it is unknown."""
    model = model_of("llama")
    cache = kvrecall.RetrievalCache(model.config, kvrecall.Full())
    engine.prefill(model, prompt(tokens), cache)
    cache.save(tmp_path)
    session, _ = read_index(tmp_path)
    del session.cache.values["long_factors"]
    with PrivateFolder(tmp_path) as folder:
        write_index(folder, session)
    if tokens > SWITCH:
        with pytest.raises(errors.SessionError, match="long_factors: expected which factors of the rotary embedding"):
            kvrecall.RetrievalCache.load(tmp_path, model.config, model=model)
    else:
        assert kvrecall.RetrievalCache.load(tmp_path, model.config, model=model).long_factors is False

"""Key statistics come from the model: the same whatever was asked before, in which batch, process or order."""

from __future__ import annotations

import gc
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import ref

import peft
import pytest
import torch
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Lfm2Config,
    Lfm2ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

import kvrecall
from kvrecall.backends.transformers import RetrievalCache, attach
from kvrecall.backends.transformers import statistics as module
from kvrecall.backends.transformers.cache_name import cache_argument
from kvrecall.backends.transformers.rotary import rotaries_of
from kvrecall.backends.transformers.statistics import Source, observed, statistics_of
from kvrecall.backends.transformers.statistics_file import ModelStatistics
from kvrecall.core.errors import StatisticsError
from kvrecall.engine.prefill import prefill
from kvrecall.engine.request import generate
from kvrecall.index.sphere import SphereIndex
from kvrecall.index.statistics import KeyStatistics
from tests.backends.models import SMALL, tiny

pytestmark = pytest.mark.filterwarnings("ignore:.*computed statistics")
ZONES: dict[str, Any] = {"sink_tokens": 4, "local_tokens": 32, "update_interval": 16, "full_attention_threshold": 0}
ODD = {"one word": [77] * 600, "two in turn": [5, 9] * 300, "ones": [1] * 600, "short": [8, 9]}


def balanced(**settings: Any) -> Any:
    return kvrecall.methods.get("pariskv-balanced", top_k=16, **ZONES | settings)


def ids_of(tokens: int, seed: int = 0, batch: int = 1) -> Tensor:
    return torch.randint(3, 300, (batch, tokens), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty one of the user's."""
    monkeypatch.setenv("KVRECALL_MODELS", str(tmp_path / "models"))
    return tmp_path / "statistics"


@pytest.fixture
def model() -> Any:
    return tiny("llama")


def read(model: Any, ids: Tensor, method: Any = None, chunk_tokens: int = 2048, **options: Any) -> RetrievalCache:
    cache = RetrievalCache(model.config, method or balanced())
    prefill(model, ids, cache, chunk_tokens=chunk_tokens, **options)
    return cache


def codes(cache: RetrievalCache) -> Iterator[Tensor]:
    for layer in cache.retrieval_layers:
        assert layer.state is not None and isinstance(layer.state.index, SphereIndex)
        for b in range(cache.sequences):
            yield from layer.state.index.codes(b).parts


def answer(model: Any, ids: Tensor) -> list[list[int]]:
    return generate(model, None, ids, balanced(), max_new_tokens=8).new_tokens


def same(one: KeyStatistics, other: KeyStatistics, rtol: float = 0.0) -> None:
    assert one.tokens == other.tokens
    for name in ("key_mean", "key_covariance", "query_second"):
        torch.testing.assert_close(getattr(one, name), getattr(other, name), rtol=rtol, atol=rtol * 1e-3)


@pytest.mark.parametrize("before", ODD.values(), ids=ODD)
def test_an_odd_first_prompt_changes_no_code_and_no_answer(model: Any, before: list[int]) -> None:
    alone = tiny("llama")
    expected, wanted = list(codes(read(alone, ids_of(300)))), answer(alone, ids_of(300))
    answer(model, torch.tensor([before]))
    found = list(codes(read(model, ids_of(300))))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))
    assert answer(model, ids_of(300)) == wanted


def test_each_sequence_of_a_batch_is_coded_as_alone(model: Any) -> None:
    ids = ids_of(200, batch=3)
    together = read(model, ids)
    for b in range(3):
        alone = read(model, ids[b : b + 1])
        for ours, theirs in zip(together.retrieval_layers, alone.retrieval_layers, strict=True):
            mine, expected = ours.state.index, theirs.state.index  # type: ignore[union-attr]
            assert mine.maps is expected.maps
            same_keys = [torch.equal(x, y) for x, y in zip(mine.codes(b).parts, expected.codes(0).parts, strict=True)]
            assert all(same_keys) or ours.number  # later layers round products of a batch otherwise


def test_another_process_has_the_same_ones(model: Any, folder: Path) -> None:
    """From its file, and computed anew."""
    expected = statistics_of(model).layers[1].keys
    said = (
        "from tests.backends.models import SMALL, tiny; from kvrecall.backends.transformers.statistics import statistics_of;"
        "print(statistics_of(tiny('llama')).layers[1].keys.key_mean.sum().item())"
    )
    for _ in range(2):
        run = subprocess.run([sys.executable, "-W", "ignore", "-c", said], capture_output=True, text=True, check=True)
        assert float(run.stdout) == expected.key_mean.sum().item()
        for file in folder.iterdir():
            file.unlink()


def test_told_once_and_kept(model: Any, folder: Path) -> None:
    with pytest.warns(UserWarning, match=r"llama: computed statistics .* random token ids in .* s, kept in .* No usable"):
        first = read(model, ids_of(40))
    assert len(list(folder.iterdir())) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = read(model, ids_of(50))
        assert again.statistics is first.statistics is statistics_of(model)
        other = statistics_of(tiny("llama"))
    same(other.layers[1].keys, first.statistics.layers[1].keys)  # type: ignore[union-attr]


def test_a_folder_that_cannot_be_written_is_told(model: Any, folder: Path) -> None:
    folder.write_text("a file")
    with pytest.warns(UserWarning, match=r"kept for this process \(.*cannot be written"):
        assert statistics_of(model) is statistics_of(model)


def test_methods_that_need_none_ask_for_none(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "rotaries_of", lambda model: pytest.fail("asked"))
    assert read(model, ids_of(100), kvrecall.ParisKV(top_k=8, **ZONES)).statistics is None


def test_statistics_are_those_of_the_keys_before_the_embedding(model: Any) -> None:
    """Of layer 0, whose keys follow from the embeddings of the tokens."""
    ids = ids_of(1100)
    found = observed(model, tuple(ids[0].tolist()), rotaries_of(model))[0]
    layer = model.model.layers[0]
    with torch.no_grad():
        hidden = layer.input_layernorm(model.model.embed_tokens(ids))
        keys = layer.self_attn.k_proj(hidden)[0].unflatten(1, (2, 64)).transpose(0, 1).double()
        queries = layer.self_attn.q_proj(hidden)[0].unflatten(1, (2, 2, 64)).permute(1, 0, 2, 3).flatten(1, 2).double()
    apart = keys - keys.mean(1, keepdim=True)
    same(found, KeyStatistics(1100, keys.mean(1), apart.mT @ apart / 1100, queries.mT @ queries / 2200), rtol=1e-3)


FAMILIES: dict[str, Any] = {
    "gemma2": lambda: tiny("gemma2"),
    "gpt_oss": lambda: tiny("gpt_oss"),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(n_embd=128, n_layer=2, n_head=2, vocab_size=320, n_positions=256)).eval(),
    "qwen3_next": lambda: Qwen3NextForCausalLM(
        Qwen3NextConfig(**SMALL, layer_types=["full_attention", "linear_attention", "linear_attention"])
    ).eval(),
    "lfm2": lambda: Lfm2ForCausalLM(Lfm2Config(**SMALL, layer_types=["conv", "full_attention", "conv"])).eval(),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str) -> None:
    """Sliding windows, softcap, sinks, learned positions, linear attention, convolutions: every retrieval layer has some."""
    model = FAMILIES[family]()
    held = statistics_of(model)
    cache = RetrievalCache(model.config, balanced())
    assert held.layers.keys() == {layer.number for layer in cache.retrieval_layers}
    assert all(layer.keys.tokens and layer.keys.finite for layer in held.layers.values())
    read(model, ids_of(60))


class Words:
    """A tokenizer that knows every word of a text by a number."""

    def __init__(self, most: int) -> None:
        self.most = most

    def __call__(self, text: str) -> Any:
        return SimpleNamespace(input_ids=[3 + sum(map(ord, word)) % self.most for word in text.split()])


def test_a_tokenizer_gives_a_text(model: Any) -> None:
    words = Words(290)
    source = Source.of(model.config, words)
    assert not source.random and len(source.ids) == module.TOKENS and len(set(source.ids)) > 128
    with attach(model, tokenizer=words), torch.inference_mode(), pytest.warns(UserWarning, match="from a text of the package"):
        cache = RetrievalCache(model.config, balanced())
        model(input_ids=ids_of(60), **cache_argument(cache), use_cache=True)
    assert cache.statistics is statistics_of(model, words) is not statistics_of(model)
    expected = observed(model, source.ids, rotaries_of(model))
    same(statistics_of(model, words).layers[2].keys, expected[2], rtol=1e-5)
    assert cache.fork(balanced(local_tokens=48)).statistics is cache.statistics


@pytest.mark.parametrize("words", [Words(100), Words(100_000)], ids=["too few", "of another model"])
def test_a_tokenizer_that_does_not_fit_is_not_used(model: Any, words: Words) -> None:
    assert Source.of(model.config, words).random


def test_changed_weights_and_adapters_have_their_own(model: Any) -> None:
    before = statistics_of(model)
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight.mul_(1.5)
    tuned = statistics_of(model)
    assert tuned is not before and not torch.equal(tuned.layers[1].keys.key_mean, before.layers[1].keys.key_mean)
    assert statistics_of(model) is tuned
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["k_proj"], init_lora_weights=False))
    adapted = read(wrapped.get_base_model(), ids_of(60)).statistics
    assert adapted is not None and not torch.equal(adapted.layers[1].keys.key_mean, tuned.layers[1].keys.key_mean)


def test_keys_that_are_not_finite_are_refused(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[3] = float("nan")
    cache = RetrievalCache(model.config, balanced())
    with pytest.raises(StatisticsError, match="keys that describe a text, got keys with NaN"):
        prefill(model, ids_of(50), cache)
    assert cache.statistics is None and cache.get_seq_length() == 0


def test_an_error_while_the_model_is_asked_changes_nothing(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise torch.OutOfMemoryError

    cache = RetrievalCache(model.config, balanced())
    with monkeypatch.context() as patch:
        patch.setattr(model.model.layers[2], "forward", full)
        with attach(model), torch.inference_mode(), pytest.raises(torch.OutOfMemoryError):
            model(input_ids=ids_of(20), **cache_argument(cache), use_cache=True)
    assert cache.statistics is None and cache.running is None and cache.get_seq_length() == 0
    assert model.config._attn_implementation != "kvrecall"
    prefill(model, ids_of(20), cache)
    assert cache.statistics is not None


def test_the_model_is_left_as_it_was(model: Any) -> None:
    model.train()
    torch.manual_seed(5)
    names, before = dict(model.named_buffers()).keys(), torch.random.get_rng_state()
    statistics_of(model)
    assert model.training and dict(model.named_buffers()).keys() == names and model.config._attn_implementation == "sdpa"
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("local_tokens", [32, 48], ids=["same zones", "other zones"])
def test_a_fork_under_a_method_that_needs_statistics(model: Any, local_tokens: int) -> None:
    plain = read(model, ids_of(300), kvrecall.methods.get("full", **ZONES))
    assert plain.statistics is None
    fork = plain.fork(balanced(local_tokens=local_tokens))
    assert fork.statistics is statistics_of(model)
    assert fork.layers[1].state.shape.statistics is fork.statistics.layers[1]
    whole = read(model, ids_of(300), balanced(local_tokens=local_tokens))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(codes(fork), codes(whole), strict=True))


def test_a_reset_cache_asks_anew(model: Any) -> None:
    cache = read(model, ids_of(300))
    before = cache.statistics
    cache.reset()
    assert cache.statistics is None
    prefill(model, ids_of(50), cache)
    assert cache.statistics is before


def test_a_model_is_not_kept_alive() -> None:
    model = tiny("llama")
    held = statistics_of(model)
    assert isinstance(held, ModelStatistics)
    gone = ref(model)
    del model
    gc.collect()
    assert gone() is None

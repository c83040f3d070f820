"""Families that kvrecall cannot serve are refused by name, before anything is stored."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version

import kvrecall
from kvrecall.backends.transformers.cache_name import cache_argument, given_cache
from kvrecall.core import errors
from tests.backends.models import SMALL, tiny
from tests.backends.test_attach import COVERING, answer, ids

OTHER = {"vocab_size": 320, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
REFUSED_CONFIGS: dict[str, tuple[str, dict[str, Any], str]] = {
    "T5": ("T5Config", {}, "t5: .*an encoder-decoder model"),
    "BART": ("BartConfig", {}, "bart: .*an encoder-decoder model"),
    "Whisper": ("WhisperConfig", {}, "whisper: .*an encoder-decoder model"),
    "DeepSeek V3": ("DeepseekV3Config", {}, r"deepseek_v3: .*multi-head latent attention \(MLA\)"),
    "Mamba": ("MambaConfig", {}, r"mamba: .*no layer that only attends.*LinearAttentionLayer"),
    "Mistral, all sliding": ("MistralConfig", {"sliding_window": 32}, r"mistral: .*cache layers: DynamicSlidingWindowLayer"),
    "Gemma 3n": ("Gemma3nTextConfig", {}, "gemma3n_text: .*num_kv_shared_layers"),
    "Falcon with ALiBi": ("FalconConfig", {"alibi": True}, "falcon: .*ALiBi"),
}


@pytest.mark.parametrize("name", REFUSED_CONFIGS)
def test_refused_when_the_cache_is_made(name: str) -> None:
    kind, changes, says = REFUSED_CONFIGS[name]
    with pytest.raises(errors.UnsupportedModelError, match=says):
        kvrecall.RetrievalCache(getattr(transformers, kind)(**changes), COVERING)


OWN_ATTENTION = {
    "Falcon": ("FalconForCausalLM", "FalconConfig", {"hidden_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}),
    "Bloom": ("BloomForCausalLM", "BloomConfig", {"hidden_size": 128, "n_layer": 1, "n_head": 2}),
}
INTERLEAVED = {
    "GPT-J": (
        "GPTJForCausalLM",
        "GPTJConfig",
        {"n_embd": 128, "n_layer": 2, "n_head": 2, "rotary_dim": 32, "n_positions": 512},
    ),
    "CodeGen": ("CodeGenForCausalLM", "CodeGenConfig", {"n_embd": 256, "n_layer": 2, "n_head": 4, "rotary_dim": 32}),
}
"""Their attention goes through transformers' interface from 5.24 on."""


def made(name: str) -> Any:
    kind, config, given = (OWN_ATTENTION | INTERLEAVED)[name]
    return getattr(transformers, kind)(getattr(transformers, config)(**{**OTHER, **given})).eval()


@pytest.mark.parametrize("name", OWN_ATTENTION)
def test_attention_without_the_interface_is_refused_at_attach(name: str) -> None:
    with pytest.raises(errors.UnsupportedModelError, match="attention of its own"), kvrecall.attach(made(name)):
        pass


@pytest.mark.parametrize("name", INTERLEAVED)
def test_interleaved_rotary_attention_is_served_where_it_goes_through_the_interface(name: str) -> None:
    model = made(name)
    if Version(transformers.__version__) < Version("5.24.0.dev0"):
        with pytest.raises(errors.UnsupportedModelError, match="attention of its own"), kvrecall.attach(model):
            pass
        return
    cache = kvrecall.RetrievalCache(model.config, COVERING)
    with kvrecall.attach(model):
        assert torch.equal(answer(model, ids(), cache), answer(model, ids()))
    assert [layer.get_seq_length() > 60 for layer in cache.retrieval_layers] == [True, True]


@pytest.mark.parametrize(("name", "says"), [("Doge", "computes with its mask"), ("MiniMax", "a cache class of its own")])
def test_families_that_would_fail_with_an_error_of_their_own(name: str, says: str) -> None:
    config = getattr(transformers, f"{name}Config")(**{**SMALL, "num_hidden_layers": 1, "num_local_experts": 2})
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with pytest.raises(errors.UnsupportedModelError, match=says), kvrecall.attach(model):
        pass


def test_layers_that_run_several_times_are_refused() -> None:
    """Dory, from transformers 5.24 on, adds copies of cache layers, or reads their keys without the attention function."""
    model = tiny("llama")
    model.config.model_type = "dory"
    with pytest.raises(errors.UnsupportedModelError, match=r"dory: .*run several times"), kvrecall.attach(model):
        pass


def test_a_decoder_that_could_have_an_encoder() -> None:
    """BART's decoder alone: it asks for a mask of encoder states that it is not given."""
    config = transformers.BartConfig(
        **OTHER, d_model=128, decoder_layers=1, decoder_attention_heads=2, encoder_layers=1, encoder_attention_heads=2,
        decoder_ffn_dim=64, max_position_embeddings=512, is_decoder=True, is_encoder_decoder=False,
    )  # fmt: skip
    model: Any = transformers.BartForCausalLM(config).eval()
    cache = kvrecall.RetrievalCache(model.config, COVERING)
    with kvrecall.attach(model):
        assert torch.equal(answer(model, ids(), cache), answer(model, ids()))
    assert cache.get_seq_length() > 60


def test_an_encoder_decoder_is_refused_at_attach() -> None:
    config = transformers.BartConfig(
        vocab_size=320, d_model=64, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=64, decoder_ffn_dim=64,
    )  # fmt: skip
    model = transformers.BartForConditionalGeneration(config).eval()
    with pytest.raises(errors.UnsupportedModelError, match=r"bart: .*an encoder-decoder"), kvrecall.attach(model):
        pass


def test_one_key_attended_twice() -> None:
    """DiffLlama takes two halves of doubled values with one set of keys."""
    model: Any = transformers.DiffLlamaForCausalLM(transformers.DiffLlamaConfig(**{**SMALL, "num_hidden_layers": 2})).eval()
    cache = kvrecall.RetrievalCache(model.config, COVERING)
    with kvrecall.attach(model), pytest.raises(errors.UnsupportedModelError, match="diffllama"):
        answer(model, ids(), cache)
    assert [layer.get_seq_length() for layer in cache.retrieval_layers] == [0, 0]


def test_a_layer_that_goes_past_its_attention() -> None:
    """Whatever a model does with the keys that it does not attend to: the pass is undone."""

    def skips(hidden_states: torch.Tensor, **given: Any) -> tuple[torch.Tensor, None]:
        shape = (*hidden_states.shape[:2], 2, 64)
        keys = attention.k_proj(hidden_states).view(shape).transpose(1, 2)
        given_cache(given).update(keys, keys, attention.layer_idx)
        return hidden_states, None

    model = tiny("llama")
    cache = kvrecall.RetrievalCache(model.config, COVERING)
    attention = model.model.layers[2].self_attn
    with kvrecall.attach(model), torch.no_grad():
        model(ids(), **cache_argument(cache))
        attention.forward = skips
        with pytest.raises(errors.UnsupportedModelError, match="the attention of layers 2 did not go through"):
            model(ids(5), **cache_argument(cache))
        assert {layer.get_seq_length() for layer in cache.retrieval_layers} == {60}
        del attention.forward
        whole = torch.cat([ids(), ids(5)], 1)
        assert torch.equal(answer(model, whole, cache), answer(model, whole))


def test_tokens_that_see_each_other_in_both_directions() -> None:
    """Gemma 3 lets the tokens of an image see each other."""
    model: Any = tiny("gemma3")
    cache = kvrecall.RetrievalCache(model.config, COVERING)
    model.config.use_bidirectional_attention = True
    with kvrecall.attach(model), pytest.raises(errors.KVRecallError, match=r"both directions|not causal"), torch.no_grad():
        model(ids(), **cache_argument(cache))
    assert cache.get_seq_length() == 0

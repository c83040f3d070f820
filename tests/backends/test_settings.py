"""The hash of a config covers what computes: a setting that changes a logit changes the hash, names and versions do not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Gemma2Config, LlamaConfig

from kvrecall.backends.transformers import fingerprint
from kvrecall.backends.transformers.fingerprint import config_digest
from tests.backends.models import SMALL

FAMILIES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "llama": ({}, {"rms_norm_eps", "hidden_act", "rope_parameters"}),
    "qwen2": ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, {"sliding_window"}),
    "granite": (
        {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2},
        {"embedding_multiplier", "logits_scaling", "residual_multiplier", "attention_multiplier"},
    ),
    "gemma2": (
        {"query_pre_attn_scalar": 64, "sliding_window": 8},
        {"final_logit_softcapping", "attn_logit_softcapping", "query_pre_attn_scalar", "hidden_activation", "sliding_window"},
    ),
    "qwen3_moe": (
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
        {"num_experts_per_tok", "norm_topk_prob"},
    ),
    "cohere2": ({"sliding_window": 8, "logit_scale": 0.5}, {"logit_scale", "layer_norm_eps"}),
}  # fmt: skip
"""Settings of tiny models by family, and some of those that must be found to compute."""
IDS = torch.randint(3, 300, (1, 40), generator=torch.Generator().manual_seed(0))


def config_of(family: str, **changes: Any) -> Any:
    small = {"head_dim": 32, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    return AutoConfig.for_model(family, **{**SMALL, **small, **FAMILIES.get(family, ({}, {}))[0], **changes})


def others(name: str, value: object) -> Iterator[object]:
    """Other values of a setting."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (value + 1, value - 1)
    elif isinstance(value, float):
        yield value * 3 + 0.01
    elif name.startswith("hidden_act"):
        yield "relu"
    elif name == "rope_parameters":
        yield {**value, "rope_theta": 50.0}  # type: ignore[dict-item]
    elif isinstance(value, list) and value and isinstance(value[0], str):
        yield value[::-1]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", FAMILIES)
def test_what_changes_an_answer_changes_the_hash(family: str) -> None:
    config = config_of(family)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    weights, own = model.state_dict(), config_digest(config)
    with torch.no_grad():
        wanted, computing = model(IDS).logits, set[str]()
        for name, value in config.to_dict().items():
            if name == "tie_word_embeddings":  # says which weights the head has, and no row of a cache depends on the head
                continue
            for other in others(name, value):
                try:
                    changed = config_of(family, **{name: other})
                    made = AutoModelForCausalLM.from_config(changed).eval()
                    made.load_state_dict(weights)
                    got = made(IDS).logits
                except Exception:  # other shapes, or values that this family refuses
                    continue
                if got.shape != wanted.shape or not torch.equal(got, wanted):
                    computing.add(name)
                    assert config_digest(changed) != own, name
    assert FAMILIES[family][1] <= computing


@pytest.mark.parametrize(
    "name",
    ["_name_or_path", "transformers_version", "architectures", "bos_token_id", "pad_token_id", "attention_dropout", "use_cache",
     "dtype", "initializer_range", "id2label", "unsloth_version", "output_attentions"],
)  # fmt: skip
def test_names_versions_and_training_do_not_count(name: str) -> None:
    config = config_of("llama")
    own = config_digest(config)
    values = {"dtype": torch.float16, "id2label": {0: "A"}, "architectures": ["Other"], "attention_dropout": 0.1}
    values |= {"use_cache": False, "initializer_range": 0.5, "output_attentions": True}
    setattr(config, name, values.get(name, 7))
    assert config_digest(config) == own


def test_settings_that_another_release_adds_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """At their defaults; with another value they do."""
    config = config_of("llama")
    own, before = config_digest(config), fingerprint._defaults(LlamaConfig)
    more = {"gated": False, "window_scale": 1.5, "layer_types": ["full_attention"] * 32, "new_kind": None}
    monkeypatch.setattr(fingerprint, "_defaults", lambda kind: {**before, **more})
    for name, value in {**more, "layer_types": ["full_attention"] * config.num_hidden_layers}.items():
        setattr(config, name, value)
    assert config_digest(config) == own
    config.window_scale = 2.0
    assert config_digest(config) != own


def test_version_1_hashes_what_it_did() -> None:
    config = config_of("llama", vocab_size=64)
    assert config_digest(config, 1) == config_digest(config_of("llama", vocab_size=64, rms_norm_eps=0.1), 1)
    assert config_digest(config, 1) != config_digest(config_of("llama", vocab_size=65), 1)


def test_a_setting_that_is_switched_off_is_another_model() -> None:
    """None is a value of its own where the default is another one."""
    soft, hard = (Gemma2Config(attn_logit_softcapping=cap) for cap in (50.0, None))
    assert config_digest(soft) != config_digest(hard)

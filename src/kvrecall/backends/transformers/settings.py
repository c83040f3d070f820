"""A hash of the settings in a model's config that its text decoder computes with."""

from __future__ import annotations

import hashlib
import json
import re
from functools import lru_cache
from typing import Any

from transformers import PretrainedConfig

VERSION = 2
"""Of the rule."""
_COMPUTES_NOTHING = re.compile(
    r"_.*|(torch_)?dtype|.*version|.*name_or_path|architectures|auto_map|transformers\..*|unsloth.*|tokenizer_class|prefix"
    r"|attn_implementation|.*token_ids?|tie_word_embeddings|pretraining_tp|chunk_size_feed_forward|gradient_checkpointing.*"
    r"|.*dropout.*|.*pdrop|.*layerdrop|initializer_.*|embedding_initializer_range|(embed_)?init_std|.*loss.*"
    r"|output_(attentions|hidden_states|router_logits)|(use_)?return_dict|use_cache|num_logits_to_keep|num_labels|id2label"
    r"|label2id|problem_type|finetuning_task|task_specific_params|summary_.*|classifier_.*"
)
"""Settings that change no key and no logit of a decoder: names, versions, training, tokens of `generate`, forms of output."""
_VERSION_1 = re.compile(
    r"model_type|hidden_size|vocab_size|.*num.*layers|.*num.*heads|.*head_dim|layer_types|.*rope.*|.*rotary.*|max_position_embeddings"
)
"""Settings that version 1 hashed, whatever their values."""


def config_digest(config: PretrainedConfig, version: int = VERSION) -> str:
    """The hash, hexadecimal, under the rule of a version."""
    text: Any = config.get_text_config(decoder=True)
    settings = text.to_dict()
    if version == 1:
        settings = {name: value for name, value in settings.items() if _VERSION_1.fullmatch(name)}
    else:
        settings = {"model_type": text.model_type} | _computing(settings, _defaults(type(text)))
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()


def _computing(settings: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """The settings that may change what a model computes. Those at their defaults are left out, so that a release of
    transformers may add some; so is what models without `layer_types` do."""
    told: dict[str, Any] = {}
    for name, value in settings.items():
        plain = name == "layer_types" and set(value or ()) <= {"full_attention"}
        if value != defaults.get(name) and not plain and not _COMPUTES_NOTHING.fullmatch(str(name)):
            told[str(name)] = _computing(value, {}) if isinstance(value, dict) else value
    return told


@lru_cache
def _defaults(kind: type[PretrainedConfig]) -> dict[str, Any]:
    try:
        return kind().to_dict()
    except Exception:  # the config of another package, which needs arguments
        return {}

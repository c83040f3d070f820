"""Tiny random models of several families, head dim 64."""

from __future__ import annotations

from typing import Any

import torch

ROPE = {"rope_type": "default", "rope_theta": 10000.0}
SMALL = {
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 128,
    "vocab_size": 320,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}


def tiny(family: str, **changes: Any) -> Any:
    """A model of 3 layers in eval mode, the same weights every time."""
    import transformers

    config_class, model_class, own = {
        "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
        "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {}),
        "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {}),
        "mistral": ("MistralConfig", "MistralForCausalLM", {"sliding_window": None}),
        "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", {"sliding_window": 32, "query_pre_attn_scalar": 64}),
        "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", {"sliding_window": 32, "sliding_window_pattern": 2}),
        "cohere2": (
            "Cohere2Config",
            "Cohere2ForCausalLM",
            {"sliding_window": 32, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
        ),
        "gpt_oss": (
            "GptOssConfig",
            "GptOssForCausalLM",
            {"sliding_window": 32, "num_local_experts": 2, "num_experts_per_tok": 1, "rope_parameters": ROPE},
        ),
    }[family]  # fmt: skip
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**{**SMALL, **own, **changes})
    if hasattr(config, "layer_types") and config.layer_types and len(set(config.layer_types)) > 1:
        assert "full_attention" in config.layer_types
    model = getattr(transformers, model_class)(config).eval()
    model.generation_config.eos_token_id = None
    return model

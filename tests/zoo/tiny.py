"""Makes a tiny random model of any family of transformers, by rules about the names of config fields.

A config class tells its fields, their defaults and its sub-configs. Fields that mean a size are shrunk by name; a per-layer
list keeps the entries of the layers that the tiny model keeps, which are the first of every kind. `OWN` holds what names
cannot tell, and `VARIANTS` settings beside a family's default that use another mechanism.
"""

from __future__ import annotations

import dataclasses
import math
import re
from copy import deepcopy
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import logging

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, LAYERS, VOCAB, WINDOW, POSITIONS = 256, 4, 2, 64, 4, 320, 32, 1024
SPECIAL_FROM = 304
"""Ids from here on may mean an image or another special thing; prompts use lower ones."""
LARGEST_PARAMETERS = 100_000_000

CAUSAL = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"
AUTO = {
    CAUSAL: "AutoModelForCausalLM",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES": "AutoModelForSeq2SeqLM",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES": "AutoModelForImageTextToText",
}
"""Mapping of model types to model classes -> the class that loads them."""

Rule = tuple[str, Any]
RULES: tuple[Rule, ...] = (
    # Sizes of heads before numbers of heads: a name may hold both words.
    # Latent attention caches a latent and the turned part of its keys: of one size, so that no check of sizes refuses them.
    (r"(qk_rope|qk_nope)_head_dim|kv_lora_rank", HEAD_DIM),
    (r"qk_head_dim|v_head_dim", 2 * HEAD_DIM),
    (r"rotary_dim", 32),
    (r"linear_(key|value)_head_dim|linear_head_dim", 32),
    (r"mamba_(d_head|head_dim|headdim)", 64),
    (r"(.*_)?head_dim|dim_head|d_head|d_kv|kv_channels|attention_head_size|attention_head_dim", HEAD_DIM),
    (r"linear_num_(key_heads|value_heads|heads)|index_n_heads", 4),
    (r"mamba_(n|num)_heads|n_mamba_heads|mamba_n_heads", 8),
    (r"(.*_)?(num_key_value_heads|num_kv_heads|kv_n_heads|n_kv_heads)", lambda d: 1 if d == 1 else KV_HEADS),
    (r"(.*_)?(num_attention_heads|attention_heads|num_heads|n_heads?|num_heads)", HEADS),
    # Layers.
    (r"first_k_dense_replace|num_dense_layers|moe_layer_start_index", lambda d: min(d, 1)),
    (r"num_nextn_predict_layers|num_mem_blocks", lambda d: min(d, 1)),
    (r"max_window_layers|num_kv_shared_layers", lambda d: min(d, 2)),
    (r"moe_layer_end_index", LAYERS - 1),
    (r"(attn|expert)_layer_period", 2),
    (r"(attn|expert)_layer_offset", 1),
    (r"(num_hidden_layers|n_layers?|num_layers|num_blocks|encoder_layers|decoder_layers)", LAYERS),
    (r"(num_encoder_layers|num_decoder_layers|depth|num_layers_per_stack)", LAYERS),
    # Experts.
    (r"(n_routed_experts|num_experts|num_local_experts|moe_num_experts|zero_expert_num)", 4),
    (r"(num_experts_per_tok|moe_topk|moe_top_k|moe_k|top_k_experts)", lambda d: min(d or 2, 2)),
    (r"(n_group|topk_group)", 1),
    # Widths.
    (r"(shared_|moe_|dense_|.*_)?(intermediate_size|ffn_dim|ffn_hidden_size|feed_forward_size)(_mlp)?", 128),
    (r"dff|dim_ff|n_inner|d_inner|d_ff", 128),
    (r"(hidden_size|hidden_dim|n_embd|d_model|emb_dim|embedding_dim|dim|embedding_size|word_embed_proj_dim|lru_width)", HIDDEN),
    (r"(adapter_in_dim|adapter_out_dim|adapter_input_size|hidden_size_global|(text|audio)_hidden_size|projection_dim)", HIDDEN),
    (r"(backbone_hidden_size|projector_hidden_size|input_embedding_size|attention_hidden_size)", HIDDEN),
    (r"(embed_dim|out_hidden_size)", HIDDEN),
    (r"(.*_)?lora_rank|laurel_rank|adapter_rank|hc_lowrank|hidden_size_per_layer_input", 32),
    (r"mamba_d_ssm", 2 * HIDDEN),
    (r"mamba_d_state|state_size|ssm_state_size", 16),
    (r"(mamba_)?chunk_size|block_size", lambda d: min(d, 16)),
    # Vocabulary and positions.
    (r"(.*_)?vocab_size(_per_layer_input)?|encoder_hash_byte_group_vocab", VOCAB),
    (r"max_position_embeddings|n_positions|n_ctx|max_seq_len|max_(source|target)_positions|context_length", POSITIONS),
    # Windows.
    (r"sliding_window|sliding_window_size|window_size|attention_window_size|local_attention", WINDOW),
    (r"attention_chunk_size|keep_window_size|local_attention_window_len", WINDOW),
    (r"index_topk|indexer_budget", WINDOW),
    (r"index_block_size", 16),
    (r"index_topk_blocks", 2),
    (r"image_size", 32),
    (r"query_pre_attn_scalar", 64),
)  # fmt: skip

WIDE_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 2 * HEAD_DIM}
"""For rotary embeddings whose sections are written for heads of 128 in the modeling file."""
ROPE = {"rope_type": "default", "rope_theta": 1e4}
MAMBA_AND_ATTENTION = ["linear_attention", "full_attention"] * 2
OWN: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},  # no layer of the default attends
    "granitemoehybrid": {"layer_types": MAMBA_AND_ATTENTION},  # likewise
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 2},  # the default's list does not follow its length
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2},
    "mamba2": {"num_heads": 8},  # expand * hidden_size = num_heads * head_dim
    "deepseek_v2": {"num_experts_per_tok": 2, "n_routed_experts": 4},  # no default
    "dots1": {"num_experts_per_tok": 2, "n_routed_experts": 4, "n_shared_experts": 1},  # no default
    "xmod": {"default_language": "en_XX"},  # a forward pass needs one
    "gemma4_text": {"global_head_dim": HEAD_DIM},  # read from the arguments, not a field
    "gemma4_unified_text": {"global_head_dim": HEAD_DIM},
    "cosmos3_edge_text": WIDE_HEADS,
    "ernie4_5_vl_moe_text": WIDE_HEADS,
    "glm4v_moe_text": WIDE_HEADS,
    "paddleocr_vl_text": WIDE_HEADS,
    "qwen2_5_vl_text": WIDE_HEADS,
    "qwen2_vl_text": WIDE_HEADS,
    "qwen2_5_omni_thinker": {"vision_start_token_id": SPECIAL_FROM},  # no default
    "qwen3_omni_moe_thinker": {"vision_start_token_id": SPECIAL_FROM},  # no default
    "qwen2_5_omni_text": WIDE_HEADS,
    "glm5_next_text": {"qk_rope_head_dim": 0},  # its indexed layers have no positions
    "step3p5": {"sliding_window": WINDOW},  # no default
    "gpt_neo": {"attention_types": [[["global", "local"], LAYERS // 2]]},  # pairs of kinds and repetitions
    "dory": {"n_input_layers": 1, "n_recurrent_layers": 2, "n_output_layers": 1},  # sections of its layers
    "apertus1p5": {"image_token_offset": SPECIAL_FROM, "audio_token_offset": SPECIAL_FROM + 4},  # 4 codes each
    "apertus1p5_vision_tokenizer": {"codebook_size": 4, "base_channels": 32, "num_res_blocks": 1},
    "wavtokenizer_encoder": {"codebook_size": 4, "codebook_dim": HIDDEN},  # it has no projection
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},  # every layer of the default attends
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},  # no default
    "dbrx": {"attn_config": {"kv_n_heads": KV_HEADS, "clip_qkv": 8.0, "rope_theta": 1e4}},  # rope_theta is not a field
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROPE}},  # no default
    "dots3_note_text": {  # the sliding layers' sizes are read from the arguments
        "swa_num_attention_heads": HEADS,
        "swa_num_key_value_heads": HEADS,
        "swa_q_lora_rank": 32,
        "swa_kv_lora_rank": 64,
        "swa_head_dim": 2 * HEAD_DIM,
        "swa_qk_nope_head_dim": HEAD_DIM,
        "swa_v_head_dim": 2 * HEAD_DIM,
    },
    "qwen4_exp_text": {  # no default
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": HEAD_DIM,
        "indexer_budget": 32,
        "indexer_compress_ratio": 4,
    },
}
"""Model type -> fields whose value no name tells, each with its reason."""

SLIDING_AND_FULL = ["sliding_attention", "full_attention"] * 2
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "bert": {"seeing both ways": {"is_decoder": False}},
    "big_bird": {"full attention": {"attention_type": "original_full"}},
    "falcon": {
        "alibi": {"alibi": True},
        "new decoder": {"new_decoder_architecture": True, "num_kv_heads": KV_HEADS},
    },
    "gemma2": {"low softcap": {"attn_logit_softcapping": 2.0}},
    "gemma4_text": {
        "shared KV": {"num_kv_shared_layers": 2, "layer_types": SLIDING_AND_FULL},
        "other heads in full layers": {"global_head_dim": 2 * HEAD_DIM},
    },
    "gpt2": {"scaled by layer": {"scale_attn_by_inverse_layer_idx": True}},
    "llama": {
        "heads of 32": {"head_dim": 32},
        "heads of 128": {"head_dim": 128},
        "one KV head": {"num_key_value_heads": 1},
        "7 heads a KV head": {"num_attention_heads": 14, "hidden_size": 224},
        "no GQA": {"num_key_value_heads": HEADS},
        "dynamic rope": {"max_position_embeddings": 64, "rope_parameters": ROPE | {"rope_type": "dynamic", "factor": 4.0}},
        "yarn": {"rope_parameters": ROPE | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
    },
    "minimax_m3_vl_text": {"sparse": {"layer_types": ["full_attention", "minimax_m3_sparse"] * 2}},
    "mistral": {"full attention": {"sliding_window": None}},
    "qwen2": {"sliding": {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": SLIDING_AND_FULL}},
    "starcoder2": {"sliding": {"sliding_window": WINDOW}},
}
"""Model type -> label -> fields: mechanisms that a family's default does not show."""


@dataclasses.dataclass(frozen=True)
class Family:
    """One entry of a mapping of transformers, or a variant of one."""

    model_type: str
    model_class: str
    mapping: str
    variant: str = ""

    @property
    def name(self) -> str:
        return self.model_type + (f"[{self.variant}]" if self.variant else "")


def families(mapping: str = CAUSAL) -> list[Family]:
    """Every entry of a mapping of the installed transformers; for causal LMs also the variants."""
    found = []
    for model_type, names in getattr(modeling_auto, mapping).items():
        model_class = names if isinstance(names, str) else names[0]
        variants = ("", *VARIANTS.get(model_type, {})) if mapping == CAUSAL else ("",)
        found += [Family(model_type, model_class, mapping, variant) for variant in variants]
    return found


def family(name: str, mapping: str = CAUSAL) -> Family:
    """By its name, such as `llama` or `llama[one KV head]`."""
    return next(f for f in families(mapping) if f.name == name)


def quiet() -> None:
    """transformers warns of sizes that are meant."""
    logging.set_verbosity_error()


def tiny_model(family: Family) -> Any:
    """A model in float32 and eval mode, the same weights every time. Raises whatever transformers raises."""
    torch.manual_seed(0)
    changes = VARIANTS[family.model_type][family.variant] if family.variant else {}
    config = tiny_config(CONFIG_MAPPING[family.model_type], family.model_type, **changes)
    auto = getattr(transformers, AUTO[family.mapping])
    with torch.device("meta"):
        sizes = {n: p.numel() for n, p in auto.from_config(deepcopy(config)).named_parameters()}
    if sum(sizes.values()) > LARGEST_PARAMETERS:
        largest = max(sizes, key=sizes.__getitem__)
        raise ValueError(f"the tiny model has {sum(sizes.values()):,} parameters; the largest is {largest}: {sizes[largest]:,}")
    model = auto.from_config(deepcopy(config), dtype=torch.float32).eval()
    spread(model)
    if getattr(model, "generation_config", None) is not None:
        for name in ("eos_token_id", "forced_eos_token_id", "forced_bos_token_id"):  # what is forced is no answer of the model
            setattr(model.generation_config, name, None)
        model.generation_config.pad_token_id = 0
        if config.is_encoder_decoder:
            model.generation_config.decoder_start_token_id = 1
    return model


def tiny_config(cls: type[PreTrainedConfig], model_type: str = "", **changes: Any) -> PreTrainedConfig:
    """The config of a class with every size shrunk."""
    fields = {f.name: None if f.default is dataclasses.MISSING else f.default for f in dataclasses.fields(cls)}
    made = default_values(cls)
    values = {name: new for name, old in fields.items() if (new := shrunk(name, old)) is not None}
    if fields.get("kv_lora_rank") is not None and "num_key_value_heads" in values:
        values["num_key_value_heads"] = HEADS  # latent attention has keys of its own for every head
    if "head_dim" in fields and fields["head_dim"] is None and "qk_rope_head_dim" not in fields:
        values["head_dim"] = HEAD_DIM
    if fields.get("head_dim") is not None and fields["head_dim"] == fields.get("qk_rope_head_dim"):
        values["head_dim"] = values["qk_rope_head_dim"]  # latent attention that turns all of it
    layers = next((n for n in ("num_hidden_layers", "n_layer", "num_layers", "decoder_layers") if n in values), None)
    if layers is not None:
        values |= per_layer({n: made.get(n) for n in fields}, layers)
    for name in getattr(cls, "sub_configs", None) or {}:
        if isinstance(sub := made.get(name), PreTrainedConfig):
            values[name] = tiny_config(type(sub))
    own = OWN.get(model_type) or OWN.get(getattr(cls, "model_type", ""), {})
    return cls(**{**values, **own, **changes})


def default_values(cls: type[PreTrainedConfig]) -> dict[str, Any]:
    """What a config without arguments holds, with lists and sub-configs that the class derives; empty where it needs some."""
    try:
        return vars(cls())
    except Exception:
        return {}


def shrunk(name: str, default: Any) -> Any:
    """The tiny value of a field, None if it keeps its default. A default of None is mostly derived from the others."""
    if name.endswith(("token_id", "token_index")):
        return special(name, default)
    if name.endswith(("dropout", "pdrop", "drop")) and isinstance(default, float):
        return 0.0
    if name == "is_decoder":
        return True
    if isinstance(default, bool) or (not isinstance(default, int) and not (default is None and name == "num_key_value_heads")):
        return None
    for pattern, value in RULES:
        if re.fullmatch(pattern, name):
            return value(default) if callable(value) else value
    return None


def special(name: str, default: Any) -> int | None:
    """Ids of special tokens move below the tiny vocabulary, no two of them to one place."""
    if name == "pad_token_id":
        return 0
    if name.startswith(("bos", "eos")):
        return 1 if name.startswith("bos") else 2
    if name == "decoder_start_token_id":
        return 1
    if not isinstance(default, int) or default < SPECIAL_FROM:
        return None
    return SPECIAL_FROM + default % (VOCAB - SPECIAL_FROM)


def per_layer(default: dict[str, Any], layers: str) -> dict[str, Any]:
    """Number of layers and per-layer lists, for the first layer of every kind and the last ones."""
    total = default[layers]
    if not isinstance(total, int):
        return {}
    lists = {n: v for n, v in default.items() if isinstance(v, (list, tuple)) and len(v) == total}
    indices = {n for n in lists if n.endswith(("_idxs", "_indices", "_layer_ids")) or n == "moe_layers"}
    kinds: dict[str, int] = {}
    for i in range(total):
        kinds.setdefault(repr([v[i] for n, v in lists.items() if n not in indices]), i)
    kept = set(kinds.values()) if len(kinds) <= 2 * LAYERS else set()
    kept |= set(range(total)[-max(0, LAYERS - len(kept)) :]) if len(kept) < LAYERS else set()
    for i in range(total):
        if len(kept) < min(LAYERS, total):
            kept.add(i)
    order = sorted(kept)
    chosen: dict[str, Any] = {}
    for n, v in lists.items():
        if n in indices:
            chosen[n] = [new for new, old in enumerate(order) if old in v]
        else:
            chosen[n] = [v[i] if (new := shrunk(n, v[i])) is None else new for i in order]
    return {layers: len(order), **chosen}


def spread(model: torch.nn.Module) -> None:
    """Scales weights up, so that attention looks somewhere and logits tell tokens apart; gives biases and norms some spread."""
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if not p.is_floating_point() or not p.numel():
                continue
            if p.ndim < 2:
                p.add_(0.1 * torch.randn(p.shape, generator=draw))
                continue
            wanted = 0.1 if "emb" in name or "wte" in name else 1.5 / math.sqrt(p.shape[-1])
            have = p.std().item()
            if have == 0 or not math.isfinite(have):
                p.copy_(wanted * torch.randn(p.shape, generator=draw))
            elif have < wanted:
                p.mul_(wanted / have)

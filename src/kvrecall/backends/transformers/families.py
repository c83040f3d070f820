"""Which models a RetrievalCache can serve; everything else is refused by name before anything is stored."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

from kvrecall.core.errors import ParameterError, UnsupportedModelError
from kvrecall.methods.base import HEAD_DIMS

ENCODER_DECODER = "an encoder-decoder model (cross-attention, two caches)"
COMPILED = "Use the model as it is; on a GPU, kvrecall captures decode steps as CUDA graphs, with compiled=True also compiled."
PROMPT_LEARNING = "Its learned tokens are in no RetrievalCache: use adapters in the layers (LoRA, IA3), or another cache."

_REFUSED = {
    "doge": "attention that computes with its mask, which has to be of queries by keys",
    "dory": "layers that run several times, with copies of the cache's layers or keys read from them",
} | dict.fromkeys(
    ("exaone4_5", "hyperclovax_vision_v2", "kosmos-2.5", "omniasr"),
    "answers that differ, or an error, where a prompt is read in parts or gone on with on a fork",
)
"""Families that would otherwise fail with another library's error, or give other answers in parts."""

_STEADY_ROTARY = ("default", "linear", "llama3", "yarn", "proportional")
CHANGING_ROTARY = ("longrope", "dynamic")
"""Kinds of rotary embeddings that change with the length of the text. Others outside of both lists count as changing, too."""


def check_config(config: PretrainedConfig) -> None:
    """Raises UnsupportedModelError for an unsupported decoder, and ParameterError if `config` is no config."""
    if not isinstance(config, PretrainedConfig):
        raise ParameterError("config", "a transformers config", type(config).__name__, "Pass model.config.")
    family = config.model_type or type(config).__name__
    if config.is_encoder_decoder:
        raise UnsupportedModelError(family, ENCODER_DECODER)
    text: Any = config.get_text_config(decoder=True)
    if getattr(text, "kv_lora_rank", None):
        raise UnsupportedModelError(family, "multi-head latent attention (MLA), whose cache holds one latent for all heads")
    if getattr(text, "is_causal", True) is False or getattr(text, "use_bidirectional_attention", None) in (True, "all"):
        raise UnsupportedModelError(family, "attention in both directions")
    if getattr(text, "alibi", False):
        raise UnsupportedModelError(family, "ALiBi, a bias by position that an index does not see")
    if not getattr(text, "num_hidden_layers", None):
        raise UnsupportedModelError(family, "a config that does not tell the number of layers")
    layers = attending_layers(config)
    if not layers:
        kinds = ", ".join(sorted({type(layer).__name__ for layer in template(config)})) or "none"
        raise UnsupportedModelError(family, f"no layer that only attends, and to the whole context (its cache layers: {kinds})")
    if getattr(text, "num_kv_shared_layers", 0):
        raise UnsupportedModelError(family, "layers that attend to the keys of another layer (num_kv_shared_layers)")
    for number in layers:
        if not getattr(layer_config(text, number), "num_attention_heads", None):
            raise UnsupportedModelError(family, "a config that does not tell the number of attention heads")
        dim = Heads.of(text, number).dim
        if dim not in HEAD_DIMS:
            sizes = ", ".join(map(str, HEAD_DIMS))
            raise UnsupportedModelError(family, f"heads of {dim} numbers (kvrecall has kernels for {sizes})")


def check_model(model: PreTrainedModel) -> None:
    """Raises UnsupportedModelError for a model whose attention cannot be replaced."""
    config = model.config
    family = config.model_type or type(model).__name__
    if config.is_encoder_decoder:
        raise UnsupportedModelError(family, ENCODER_DECODER)
    if family in _REFUSED:
        raise UnsupportedModelError(family, _REFUSED[family])
    own = [x for x in vars(sys.modules[type(model).__module__]).values() if isinstance(x, type) and issubclass(x, Cache)]
    if any(kind.__module__ == type(model).__module__ for kind in own):
        raise UnsupportedModelError(family, "a model with a cache class of its own")
    for part in model.modules():
        if isinstance(part, PreTrainedModel) and not part._can_set_attn_implementation():
            got = "attention of its own that does not go through transformers' attention interface"
            raise UnsupportedModelError(part.config.model_type or type(part).__name__, got)


def changing_rotary(config: PretrainedConfig) -> str | None:
    """The kind of a rotary embedding that changes with the length of the text; None if it depends only on the position."""
    kinds = [own.get("rope_type", "default") for own in _rotaries(config)]
    return next((kind for kind in kinds if kind not in _STEADY_ROTARY), None)


def factor_switch(config: PretrainedConfig) -> int | None:
    """Tokens up to which a longrope model takes its short factors; None for other rotary embeddings."""
    found = [own["original_max_position_embeddings"] for own in _rotaries(config) if own.get("rope_type") == "longrope"]
    return min(found, default=None)


def context_limit(config: PretrainedConfig) -> int | None:
    """A model's context in tokens, prompt and answer together; None if its config does not say.

    Model cards of YaRN, linear and dynamic scaling leave `max_position_embeddings` at the original length and give the factor.
    Configs with scaling per layer type, and of other kinds, give the scaled length.
    """
    text = config.get_text_config(decoder=True)
    limit, (scaling, *more) = getattr(text, "max_position_embeddings", None), _rotaries(config)
    kind, factor = scaling.get("rope_type"), scaling.get("factor") or 1
    if not limit or more or kind not in ("yarn", "linear", "dynamic"):
        return limit
    original = scaling.get("original_max_position_embeddings") or limit
    return max(limit, int(original * factor))


def _rotaries(config: PretrainedConfig) -> list[dict[str, Any]]:
    """The parameters of a model's rotary embeddings; some models have one per layer type."""
    scaling: dict[str, Any] = getattr(config.get_text_config(decoder=True), "rope_scaling", None) or {}
    return [own for own in scaling.values() if isinstance(own, dict)] or [scaling]


def transformers_model(model: Any) -> PreTrainedModel:
    """`model` itself, or the transformers model inside a wrapper such as PEFT's. Raises ParameterError for anything else, and
    for a wrapper that puts learned tokens before the prompt."""
    found = _outermost(model) if isinstance(model, nn.Module) else []
    if len(found) != 1:
        remedy = "Load it with AutoModelForCausalLM."
        raise ParameterError("model", "a transformers PreTrainedModel", type(model).__name__, remedy)
    if any(_compiled(part) for part in model.modules() if _attends(part)):
        raise ParameterError("model", "a model that is not compiled", "one from torch.compile", COMPILED)
    if model is not found[0] and getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        got = f"PEFT's prompt learning ({type(model.active_peft_config).__name__})"
        raise ParameterError("model", "one that reads the prompt's tokens alone", got, PROMPT_LEARNING)
    return found[0]


def _compiled(module: nn.Module) -> bool:
    forward = vars(module).get("forward")
    return (
        type(module).__name__ == "OptimizedModule"
        or getattr(module, "_compiled_call_impl", None) is not None
        or hasattr(forward, "_torchdynamo_orig_callable")
    )


def _attends(module: nn.Module) -> bool:
    return any("Attention" in type(part).__name__ for part in module.modules())


def template(config: PretrainedConfig) -> list[Any]:
    """The cache layers that transformers would use for this model: plain DynamicLayers are full attention."""
    return DynamicCache(config=config).layers


def attending_layers(config: PretrainedConfig) -> list[int]:
    """Numbers of the layers that attend to the whole context; their keys and values are kvrecall's."""
    return [number for number, layer in enumerate(template(config)) if type(layer) is DynamicLayer]


@dataclass(frozen=True)
class Heads:
    """The attention heads of one layer: query heads, KV heads, numbers per head."""

    query: int
    kv: int
    dim: int

    @staticmethod
    def of(text: Any, number: int) -> Heads:
        """Heads of layer `number` of a text config."""
        own = layer_config(text, number)
        query = own.num_attention_heads
        kv = getattr(own, "num_key_value_heads", None) or query
        return Heads(query, kv, getattr(own, "head_dim", None) or own.hidden_size // query)


def layer_config(text: Any, number: int) -> Any:
    """The config of one layer, if layers have their own (Gemma 4); else the common one."""
    own = getattr(text, "per_layer_config", None)
    return own[number] if own else text


def _outermost(module: nn.Module) -> list[PreTrainedModel]:
    """The transformers models in a wrapper that are not inside another one."""
    if isinstance(module, PreTrainedModel):
        return [module]
    return [found for child in module.children() for found in _outermost(child)]


@dataclass(frozen=True)
class ModelSignature:
    """Family and sizes of a model."""

    model_type: str
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int

    @staticmethod
    def of(config: PretrainedConfig) -> ModelSignature:
        """Signature of the text decoder of a model's config; heads are those of its first full-attention layer."""
        text = config.get_text_config(decoder=True)
        heads = Heads.of(text, next(iter(attending_layers(config)), 0))
        return ModelSignature(text.model_type, text.num_hidden_layers, heads.query, heads.kv, heads.dim)

    def __str__(self) -> str:
        return f"{self.model_type}, {self.layers} layers, {self.query_heads}/{self.kv_heads} heads of {self.head_dim}"

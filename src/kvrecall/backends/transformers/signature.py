"""The properties of a model that a cache depends on."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PretrainedConfig
from transformers.cache_utils import DynamicLayer

from kvrecall.backends.transformers.families import Heads, template


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
        ours = [number for number, layer in enumerate(template(config)) if type(layer) is DynamicLayer]
        heads = Heads.of(text, ours[0] if ours else 0)
        return ModelSignature(text.model_type, text.num_hidden_layers, heads.query, heads.kv, heads.dim)

    def __str__(self) -> str:
        return f"{self.model_type}, {self.layers} layers, {self.query_heads}/{self.kv_heads} heads of {self.head_dim}"

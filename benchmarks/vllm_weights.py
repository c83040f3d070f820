"""Random weights that vLLM takes in place of a checkpoint, the same on one GPU and on several: `--load-format seeded`.

vLLM's own dummy weights are drawn per shard, so ranks together are another model than one alone. Here every tensor of a Llama
checkpoint is drawn whole, from a seed of its name, and cut by vLLM's own loading. An entry point of the group
`vllm.general_plugins` calls `register` in every process.
"""

# vLLM is installed where this is imported.
# pyright: reportMissingImports=false

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

SPREAD = 0.02
"""Standard deviation of the weights: scores of 128 numbers spread by 1.6 before the softmax."""
_LITTLE = 0.02


def shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """Tensors of a Llama checkpoint, by name."""
    size, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_attention_heads * dim, config.num_key_value_heads * dim
    layer = {
        "input_layernorm": (size,), "post_attention_layernorm": (size,), "self_attn.q_proj": (queries, size),
        "self_attn.k_proj": (keys, size), "self_attn.v_proj": (keys, size), "self_attn.o_proj": (size, queries),
        "mlp.gate_proj": (inner, size), "mlp.up_proj": (inner, size), "mlp.down_proj": (size, inner),
    }  # fmt: skip
    ends = {"model.embed_tokens": (config.vocab_size, size), "model.norm": (size,), "lm_head": (config.vocab_size, size)}
    layers = {f"model.layers.{i}.{name}": shape for i in range(config.num_hidden_layers) for name, shape in layer.items()}
    return {f"{name}.weight": shape for name, shape in (ends | layers).items()}


def weights(config: Any, device: torch.device, dtype: torch.dtype, alike: float = 0.0) -> Iterator[tuple[str, Tensor]]:
    """One tensor after the other; those of norms are ones.

    alike: the cosine of any two tokens' embeddings, and nearly that of the queries of two steps, as a text's turn slowly. For
    that, layers add little to the residual stream, and keys see nothing of what all embeddings share, so they stay random.
    """
    common = torch.ones(config.hidden_size, dtype=dtype, device=device)
    common.normal_(0, SPREAD, generator=torch.Generator(device).manual_seed(zlib.crc32(b"common")))
    for name, shape in shapes(config).items():
        draw = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
        made = torch.ones(shape, dtype=dtype, device=device)
        if len(shape) > 1:
            made.normal_(0, SPREAD, generator=draw)
        if alike and name.startswith("model.embed_tokens"):
            made.mul_((1 - alike) ** 0.5).add_(common * alike**0.5)
        if alike and "k_proj" in name:
            along = common.float() / common.float().norm()
            made -= ((made.float() @ along).unsqueeze(1) * along).to(dtype)
        if alike and ("o_proj" in name or "down_proj" in name):
            made *= _LITTLE
        yield name, made


def register() -> None:
    """Makes the load format known."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    class Seeded(BaseModelLoader):
        def download_model(self, model_config: Any) -> None:
            pass

        def load_weights(self, model: Any, model_config: Any) -> None:
            device, alike = next(model.parameters()).device, self.load_config.model_loader_extra_config.get("alike", 0.0)
            model.load_weights(weights(model_config.hf_config, device, model_config.dtype, alike))

    register_model_loader("seeded")(Seeded)

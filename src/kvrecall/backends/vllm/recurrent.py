"""Recurrent layers (Mamba, convolutions, linear attention), which vLLM's own backends serve beside kvrecall's.

Blocks of one size hold summaries or the state of such a layer, so a block has as many tokens as the state needs. While key
statistics are computed there are no blocks yet; the layers have a state here.
"""

# Only imported where vLLM is installed.
# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.v1.attention.backend import AttentionBackend, CommonAttentionMetadata

from kvrecall.core.errors import CompositionError
from kvrecall.core.launch import cdiv, next_power_of_2
from kvrecall.step.stream import STREAMED_TOKENS


def recurrent_layers(vllm_config: Any) -> dict[str, Any]:
    """The recurrent layers of an engine's model, by name."""
    layers = vllm_config.compilation_config.static_forward_context
    return {name: layer for name, layer in layers.items() if isinstance(layer, MambaBase)}


def tokens_of_states(vllm_config: Any, token_bytes: int) -> int:
    """Tokens of the smallest block whose page holds the state of each recurrent layer; 1 without such layers. token_bytes: of
    the summaries of a token. Raises CompositionError if no block is large enough."""
    layers = recurrent_layers(vllm_config).values()
    if not layers:
        return 1
    what, remedy = "vLLM with kvrecall and recurrent layers", "Use another attention backend."
    if not hasattr(AttentionBackend, "customize_spec"):
        why = "this vLLM gives a block as many tokens as keys and values take, not summaries"
        raise CompositionError(what, why, "Use vLLM 0.32 or 0.33, or another attention backend.")
    state = max(layer.get_kv_cache_spec(vllm_config).state_content_size_bytes for layer in layers)
    tokens = next_power_of_2(cdiv(state, token_bytes))
    if tokens > STREAMED_TOKENS:
        why = f"a state of {state:,} bytes needs blocks of {tokens:,} tokens, and the largest have {STREAMED_TOKENS:,}"
        raise CompositionError(what, why, remedy)
    return tokens


class _Metadata(dict[str, Any]):
    """vLLM's metadata by layer; None for all other layers, as while it measures memory."""

    def __missing__(self, name: str) -> None:
        return None


class States:
    """States of the recurrent layers for one text, which is read in chunks."""

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        self._device, self._layers = device, recurrent_layers(vllm_config)
        self._builders: dict[str, Any] = {}
        for name, layer in self._layers.items():
            spec = layer.get_kv_cache_spec(vllm_config)
            self._builders[name] = layer.get_attn_backend().get_builder_cls()(spec, [name], vllm_config, device)
        self._blocks = vllm_config.model_config.max_model_len
        """At least as many as a block table has."""

    @contextmanager
    def kept(self) -> Iterator[None]:
        """The layers keep their states, which are zero at first, in block 1."""
        before = [(layer, vars(layer).get("kv_cache")) for layer in self._layers.values()]
        for layer in self._layers.values():
            kinds = zip(layer.get_state_shape(), layer.get_state_dtype(), strict=True)
            layer.kv_cache = [torch.zeros(2, *shape, dtype=dtype, device=self._device) for shape, dtype in kinds]
        try:
            yield
        finally:
            for layer, held in before:
                layer.kv_cache = () if held is None else held

    def metadata(self, first: int, count: int) -> dict[str, Any] | None:
        """Of a pass over `count` tokens of the text from position `first` on; None without recurrent layers."""
        if not self._layers:
            return None
        lengths, begins = (torch.tensor(x, dtype=torch.int32, device="cpu") for x in ([first + count], [0, count]))
        common = CommonAttentionMetadata(
            query_start_loc=begins.to(self._device), query_start_loc_cpu=begins, seq_lens=lengths.to(self._device),
            num_reqs=1, num_actual_tokens=count, max_query_len=count, max_seq_len=first + count,
            block_table_tensor=torch.ones(1, self._blocks, dtype=torch.int32, device=self._device),
            slot_mapping=torch.arange(first, first + count, device=self._device),
            is_prefilling=torch.ones(1, dtype=torch.bool, device="cpu"), seq_lens_cpu_upper_bound=lengths,
        )  # fmt: skip
        return _Metadata((name, builder.build(0, common)) for name, builder in self._builders.items())

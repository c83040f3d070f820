"""The attention function and its mask function, as transformers calls them while a model is attached."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, flash_attention_mask, sdpa_mask

from kvrecall.attend.reference import softmax_rows
from kvrecall.errors import CacheModelError, ParameterError
from kvrecall.integrations.transformers.layer import LAYER_TAG, TaggedLayer
from kvrecall.merge import merge, sink_logits
from kvrecall.structs import AttentionParams

NAME = "kvrecall"


def retrieval_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query `[B, H_q, T, D]`, key and value as the cache's `update` returned them -> (`[B, T, H_q, D]`, None).

    Layers without a layer of ours behind their key (sliding windows that no graph holds, other caches, no cache) get plain
    attention.
    """
    layer: TaggedLayer | None = getattr(key, LAYER_TAG, None)
    params = AttentionParams(query.shape[-1] ** -0.5 if scaling is None else scaling, softcap or 0.0, s_aux)
    if layer is None:
        return _plain_attention(module, query, key, value, attention_mask, params, dropout, **kwargs)
    if dropout:
        raise ParameterError("dropout", "0", dropout, "Call model.eval(); retrieval is for inference.")
    config = getattr(module, "config", None)
    if config is not None and not layer.cache.belongs_to(config):
        raise CacheModelError(str(layer.cache.signature), type(config).__name__)
    out = layer.attend(query, key, value, attention_mask, params)
    return out.transpose(1, 2).contiguous(), None


def retrieval_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """Padding as a 2-D mask (None without padding) for plain causal layers: no query-by-key tensor at long contexts.

    Any other pattern (sliding window, chunks, overlays) belongs to layers that are passed through, so it gets sdpa's mask. A
    token that has only itself to see needs none, which is what transformers is told while a graph holds a window: it would
    record how a mask is made.
    """
    if q_length == kv_length == 1 and attention_mask is None:
        return None
    make = flash_attention_mask if mask_function is causal_mask_function and not kwargs.get("local_size") else sdpa_mask
    return make(
        batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
        mask_function=mask_function, attention_mask=attention_mask, **kwargs,
    )  # fmt: skip


def _plain_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, params: AttentionParams, dropout: float,
    **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    if mask is not None and mask.ndim == 2:
        mask = _causal(query.shape[2], key.shape[2], query.device) & mask[:, None, None, -key.shape[2] :].bool()
    elif mask is None and 1 < query.shape[2] < key.shape[2]:
        # sdpa's own causal mask is aligned with the first key, which is wrong behind cached ones.
        mask = _causal(query.shape[2], key.shape[2], query.device)
    if not params.softcap and params.sink_logits is None:
        return sdpa_attention_forward(module, query, key, value, mask, dropout=dropout, scaling=params.scaling, **kwargs)
    if mask is None:
        mask = _causal(query.shape[2], key.shape[2], query.device)
    grouped = query.float().unflatten(1, (key.shape[1], -1))
    logits = torch.einsum("bhgtd,bhnd->bhgtn", grouped, key.float()) * params.scaling
    if params.softcap:
        logits = params.softcap * torch.tanh(logits / params.softcap)
    mask = mask.unsqueeze(2)
    logits = logits.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else logits + mask
    parts = [softmax_rows(logits, value.float())]
    if params.sink_logits is not None:
        parts.append(sink_logits(params.sink_logits, parts[0]))
    return merge(parts).out.to(query.dtype).transpose(1, 2).contiguous(), None


def _causal(queries: int, keys: int, device: torch.device) -> Tensor:
    """bool `[1, 1, T_q, T_kv]`: the last query sees every key."""
    last = torch.arange(keys - queries, keys, device=device).unsqueeze(1)
    return (torch.arange(keys, device=device) <= last)[None, None]

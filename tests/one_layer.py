"""One layer without a model: builders that tests of the data path share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import kvrecall
from kvrecall.index.base import LayerShape
from kvrecall.layer_state import LayerState
from kvrecall.structs import AttentionParams

GQA_MODES = ("mean_q", "mean_softmax", "max", "per_head")
ZONES: dict[str, Any] = {"sink_tokens": 4, "local_tokens": 16, "update_interval": 8, "full_attention_threshold": 0}


def methods(top_k: int) -> dict[str, kvrecall.Method]:
    """Every method in every GQA mode, with small zones."""
    found: dict[str, kvrecall.Method] = {"full": kvrecall.Full(**ZONES)}
    for mode in GQA_MODES:
        found[f"pariskv-{mode}"] = kvrecall.ParisKV(top_k=top_k, gqa=mode, **ZONES)
        found[f"exact-{mode}"] = kvrecall.Exact(top_k=top_k, gqa=mode, **ZONES)
    return found


def layer(method: kvrecall.Method, sequences: int = 1, dtype: torch.dtype = torch.float32, dim: int = 64) -> LayerState:
    """An empty layer on the CPU with 6 query heads and 2 KV heads."""
    return LayerState(0, LayerShape(sequences, 6, 2, dim, dtype, torch.device("cpu")), method)


def params(dim: int = 64, **changes: Any) -> AttentionParams:
    """Attention parameters with the usual scaling."""
    return AttentionParams(dim**-0.5, **changes)


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Gaussian fp32 numbers, the same for the same seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def dense(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """fp64 attention of queries `[H_q, D]` over keys and values `[H_kv, n, D]` -> fp32 `[H_q, D]`."""
    group = queries.shape[0] // keys.shape[0]
    keys, values = (x.double().repeat_interleave(group, 0) for x in (keys, values))
    logits = torch.einsum("hd,hnd->hn", queries.double(), keys) * queries.shape[-1] ** -0.5
    return torch.einsum("hn,hnd->hd", logits.softmax(-1), values).float()

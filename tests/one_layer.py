"""One layer without a model: builders that tests of the data path share."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

import kvrecall
from kvrecall.core.structs import AttentionParams
from kvrecall.index.base import LayerShape
from kvrecall.layer.state import LayerState
from tests.index.sphere.with_statistics import usual

GQA_MODES = ("mean_q", "mean_softmax", "max", "max_softmax", "per_head")
ZONES: dict[str, Any] = {"sink_tokens": 4, "local_tokens": 16, "update_interval": 8, "full_attention_threshold": 0}


def methods(top_k: int) -> dict[str, kvrecall.Method]:
    """Every method in every GQA mode, with small zones."""
    found: dict[str, kvrecall.Method] = {"full": kvrecall.Full(**ZONES)}
    for mode in GQA_MODES:
        found[f"pariskv-{mode}"] = kvrecall.ParisKV(top_k=top_k, gqa=mode, **ZONES)
        if mode in ("mean_softmax", "max", "per_head"):
            found[f"pariskv-balanced-{mode}"] = kvrecall.methods.get("pariskv-balanced", top_k=top_k, gqa=mode, **ZONES)
        found[f"exact-{mode}"] = kvrecall.Exact(top_k=top_k, gqa=mode, **ZONES)
        found[f"louiskv-{mode}"] = kvrecall.LouisKV(
            top_k=top_k, gqa=mode, dense_layers=(), cluster_tokens=4, stretch_tokens=32, max_segment_tokens=8, **ZONES
        )
        found[f"prkv-{mode}"] = kvrecall.PRKV(
            top_k=top_k,
            gqa=mode,
            page_tokens=4,
            window_tokens=8,
            refresh_interval=6,
            refresh_lead_tokens=3,
            static_ratio=0.6,
            **ZONES,
        )
        if mode != "mean_q":
            found[f"ctkvr-{mode}"] = kvrecall.CTKVR(
                top_k=top_k, gqa=mode, tokens_per_centroid=3, recalled_centroids=2, pool_tokens=5, **ZONES
            )
    return found | compositions(top_k)


CHOICES = {
    "index": [
        "sphere", "exact", "pages:page_tokens=4", "pages:page_tokens=3,bounds=min-max",
        "clusters:cluster_tokens=4,stretch_tokens=32,max_segment_tokens=8",
        "query-centroids:tokens_per_centroid=3,pool_tokens=5",
        "query-centroids:tokens_per_centroid=3,pool_tokens=5,rerank=device",
    ],
    "trigger": ["every-step", "fixed-stride:steps=3", "semantic-boundary:threshold=0.2", "semantic-boundary:compare=retrieval"],
    "static": [None, "observation-window:ratio=0.6,window_tokens=8,interval=6,page_tokens=2,lead_tokens=3",
               "observation-window:ratio=online,window_tokens=8,interval=6,page_tokens=1,lead_tokens=1"],
    "gqa": [None, *GQA_MODES],
    "fetch": [None, "direct:reuse=true", "staged", "staged:reuse=true"],
    "attend": [None, "device", "host"],
}  # fmt: skip


BASELINE_CHOICES = {
    **CHOICES,
    "index": [
        "sphere", "query-centroids:tokens_per_centroid=3,pool_tokens=5", "pages:page_tokens=3,bounds=mean", "product:bits=3",
        "soft-hash:bits=6,tables=20", "accumulated", "milestones:page_tokens=3",
        "estimating-clusters:cluster_tokens=4,stretch_tokens=32",
    ],
    "trigger": ["every-step", "speculative:threshold=0.05", "semantic-boundary:threshold=0.2"],
    "static": [None, "outlier-pages:pages=2,page_tokens=2"],
    "prune": [None, "top-p:p=1"],
}  # fmt: skip
"""With the parts that the baselines brought."""


def compositions(top_k: int) -> dict[str, kvrecall.Method]:
    """Random combinations of all parts, the same ones every time; pairs that are refused are drawn again."""
    return _drawn(top_k, CHOICES, 10) | _drawn(top_k, BASELINE_CHOICES, 8)


def _drawn(top_k: int, choices: dict[str, list[Any]], count: int) -> dict[str, kvrecall.Method]:
    draw, found = random.Random(1), {}
    while len(found) < count:
        parts = {role: draw.choice(choice) for role, choice in choices.items()}
        name = "-".join(str(part).split(":")[0] for part in parts.values() if part)
        try:
            found.setdefault(f"composed-{name}", kvrecall.Method(top_k=top_k, **parts, **ZONES))
        except ValueError:
            continue
    return found


def index_keys(state: LayerState, sequence: int, keys: Tensor) -> None:
    """Puts keys `[H_kv, n, D]` in the retrieval zone of a sequence, as if a prompt had filled it."""
    rows = torch.stack([keys, keys], 2)
    state.store.host[sequence].append(rows)
    state.absorb(sequence, rows)


def layer(
    method: kvrecall.Method, sequences: int = 1, dtype: torch.dtype = torch.float32, dim: int = 64, device: str = "cpu",
    turned: bool = True, small: bool = False,
) -> LayerState:  # fmt: skip
    """An empty layer with 6 query heads and 2 KV heads, which knows its model's statistics. turned: by a rotary embedding.
    small: rows in host memory are in eight bits."""
    known = usual(2, 3, dim, turned)
    shape = LayerShape(sequences, 6, 2, dim, dtype, torch.device(device), statistics=known, fp8_rows=small)
    return LayerState(0, shape, method)


def params(dim: int = 64, **changes: Any) -> AttentionParams:
    """Attention parameters with the usual scaling."""
    return AttentionParams(dim**-0.5, **changes)


def normal(*shape: int, seed: int = 0, device: str = "cpu") -> Tensor:
    """Gaussian fp32 numbers, the same for the same seed, wherever they are wanted."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


def dense(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """fp64 attention of queries `[H_q, D]` over keys and values `[H_kv, n, D]` -> fp32 `[H_q, D]`."""
    group = queries.shape[0] // keys.shape[0]
    keys, values = (x.double().repeat_interleave(group, 0) for x in (keys, values))
    logits = torch.einsum("hd,hnd->hn", queries.double(), keys) * queries.shape[-1] ** -0.5
    return torch.einsum("hn,hnd->hd", logits.softmax(-1), values).float()

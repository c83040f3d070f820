"""Layers of a model without the model: states fed with synthetic queries, keys and values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import kvrecall
from kvrecall.cache.blocks import BlockTable
from kvrecall.core.structs import AttentionParams
from kvrecall.index.base import LayerShape
from kvrecall.index.statistics import LayerStatistics
from kvrecall.layer.pipeline import decode_step, prefill_layer
from kvrecall.layer.state import LayerState
from kvrecall.methods import Method, get
from tests.attend.dense import dense
from tests.index.sphere.with_statistics import usual
from tests.strategies import MODES, gaussian

DIM = 64
ZONES: dict[str, Any] = {"sink_tokens": 4, "local_tokens": 16, "update_interval": 8, "full_attention_threshold": 0}
PARAMS = AttentionParams(DIM**-0.5)


def methods(top_k: int, **zones: Any) -> dict[str, Method]:
    """Every method that retrieves, in every way of sharing a search."""
    zones = ZONES | zones
    found: dict[str, Method] = {f"pariskv-{mode}": kvrecall.ParisKV(top_k=top_k, gqa=mode, **zones) for mode in MODES}
    for mode in ("mean_q", "max_softmax"):
        found[f"pariskv-balanced-{mode}"] = get("pariskv-balanced", top_k=top_k, gqa=mode, **zones)
    found |= {f"exact-{mode}": kvrecall.Exact(top_k=top_k, gqa=mode, **zones) for mode in MODES}
    found["prkv"] = kvrecall.PRKV(
        top_k=top_k, page_tokens=2, window_tokens=8, refresh_interval=5, refresh_lead_tokens=2, **zones
    )
    found["ctkvr"] = kvrecall.CTKVR(top_k=top_k, tokens_per_centroid=3, recalled_centroids=2, pool_tokens=5, **zones)
    small = {"cluster_tokens": 4, "stretch_tokens": 32, "max_segment_tokens": min(8, zones["update_interval"])}
    return found | {"louiskv": kvrecall.LouisKV(top_k=top_k, dense_layers=(), **small, **zones)}


def state(
    method: Method, sequences: int, layer: int = 0, kv_heads: int = 2, group: int = 2, dtype: torch.dtype = torch.float32,
    observe_queries: int = 0, dim: int = DIM, statistics: LayerStatistics | None = None,
    tables: list[BlockTable] | None = None, small: bool = False,
) -> LayerState:  # fmt: skip
    """statistics: of the model, by default the usual ones. tables: blocks of its sequences. small:
    rows in host memory are in eight bits."""
    known = statistics or usual(kv_heads, group, dim)
    cpu = torch.device("cpu")
    shape = LayerShape(sequences, kv_heads * group, kv_heads, dim, dtype, cpu, statistics=known, fp8_rows=small)
    return LayerState(layer, shape, method, observe_queries=observe_queries, tables=tables)


def tokens(
    seed: int, batch: int, count: int, kv_heads: int = 2, group: int = 2, dim: int = DIM
) -> tuple[Tensor, Tensor, Tensor]:
    """Random queries, keys, values `[B, H, T, D]`."""
    return (
        2 * gaussian(seed, batch, kv_heads * group, count, dim),
        gaussian(seed + 1, batch, kv_heads, count, dim),
        gaussian(seed + 2, batch, kv_heads, count, dim),
    )


class History:
    """All real tokens of every sequence, to attend to them densely."""

    def __init__(self, batch: int, kv_heads: int = 2) -> None:
        self.keys = [torch.empty(kv_heads, 0, DIM) for _ in range(batch)]
        self.values = [torch.empty(kv_heads, 0, DIM) for _ in range(batch)]

    def add(self, keys: Tensor, values: Tensor, valid: Tensor | None = None) -> None:
        for b in range(keys.shape[0]):
            real = slice(None) if valid is None else valid[b]
            self.keys[b] = torch.cat([self.keys[b], keys[b][:, real]], 1)
            self.values[b] = torch.cat([self.values[b], values[b][:, real]], 1)

    def dense(self, b: int, queries: Tensor) -> Tensor:
        """float64 attention of `[H_q, T, D]` over everything; query t does not see what came after it."""
        return dense(queries, self.keys[b], self.values[b], PARAMS.scaling, causal=True)[0]


def left_padded(lengths: list[int]) -> Tensor:
    """bool `[B, longest]`, False for padding."""
    longest = max(lengths)
    return torch.arange(longest) >= longest - torch.tensor(lengths).unsqueeze(1)


def start(layer: LayerState, lengths: list[int], seed: int = 0) -> History:
    """Prefills a ragged, left-padded prompt in one chunk."""
    history, valid = History(len(lengths)), left_padded(lengths)
    queries, keys, values = tokens(seed, len(lengths), max(lengths))
    ragged = None if valid.all() else valid
    prefill_layer(layer, queries, keys, values, ragged, PARAMS)
    history.add(keys, values, valid)
    return history


def step(layer: LayerState, history: History, seed: int) -> tuple[Tensor, Tensor]:
    """One random token per sequence; returns (queries, output), `[B, H_q, 1, D]`."""
    queries, keys, values = tokens(seed, len(history.keys), 1)
    history.add(keys, values)
    return queries, decode_step(layer, queries, keys, values, None, PARAMS)


def held_ids(layer: LayerState, b: int) -> list[list[int]]:
    """What the last search of a sequence found, per KV head."""
    ids, counts, *_ = layer.held[b]
    return [row[:n] for row, n in zip(ids.tolist(), counts.tolist(), strict=True)]

"""A prompt and decode steps of one layer under CTkvr, with planted keys and queries."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import kvrecall
from kvrecall.index.query_centroids import CentroidIndex
from kvrecall.index.query_centroids.lists import CentroidLists
from kvrecall.layer.pipeline import decode_step, prefill_layer
from tests.one_layer import ZONES, dense, layer, normal, params

SINK, LOCAL, SCALING = 4, 16, 0.125
LONG = 200


def method(**changes: Any) -> kvrecall.CTKVR:
    settings: dict[str, Any] = {"top_k": 8, "tokens_per_centroid": 5, "recalled_centroids": 2, "pool_tokens": 0, **ZONES}
    return kvrecall.CTKVR(**{**settings, **changes})


class Course:
    """One prompt and the decode steps after it, every token remembered; planted keys and queries replace random ones."""

    def __init__(
        self,
        method: kvrecall.Method,
        tokens: int = LONG,
        keys: dict[int, Tensor] | None = None,
        queries: dict[int, Tensor] | None = None,
        chunk: int = 10_000,
    ) -> None:
        self.state = layer(method)
        self.queries, self.keys, self.values = (normal(h, tokens, 64, seed=i + 1) for i, h in enumerate((6, 2, 2)))
        for where, planted in ((self.keys, keys or {}), (self.queries, queries or {})):
            for position, vector in planted.items():
                where[:, position] = vector
        for start in range(0, tokens, chunk):
            q, k, v = (x[None, :, start : start + chunk] for x in (self.queries, self.keys, self.values))
            prefill_layer(self.state, q, k, v, None, params())
        self.steps = 0

    def step(self, query: Tensor | None = None, key: Tensor | None = None) -> Tensor:
        """One decode step: its output `[H_q, D]`."""
        self.steps += 1
        q, k, v = (normal(h, 64, seed=100 + 3 * self.steps + i) for i, h in enumerate((6, 2, 2)))
        q, k = q if query is None else query, k if key is None else key
        self.query = q
        self.keys, self.values = torch.cat([self.keys, k[:, None]], 1), torch.cat([self.values, v[:, None]], 1)
        return decode_step(self.state, q[None, :, None], k[None, :, None], v[None, :, None], None, params())[0, :, 0]

    @property
    def index(self) -> CentroidIndex:
        assert isinstance(self.state.index, CentroidIndex)
        return self.state.index

    @property
    def lists(self) -> CentroidLists:
        lists = self.index._lists[0]
        assert lists is not None
        return lists

    def selected(self) -> list[list[int]]:
        """Positions in the sequence of what the last step retrieved, per KV head."""
        return [[i + SINK for i in own if i >= 0] for own in self.state.attended_ids(0).tolist()]

    def dense_over(self, selected: list[list[int]], retrieval: int) -> Tensor:
        """Attention over the selected and the resident tokens, when the zone held `retrieval` tokens."""
        resident = [*range(SINK), *range(SINK + retrieval, self.keys.shape[1])]
        outs = []
        for h, own in enumerate(selected):
            rows = sorted([*resident, *own])
            outs.append(dense(self.query[3 * h : 3 * h + 3], self.keys[h : h + 1, rows], self.values[h : h + 1, rows]))
        return torch.cat(outs)


def wanting(key: Tensor) -> Tensor:
    """Queries `[6, D]` of which every head is aligned with its KV head's key `[2, D]`."""
    return key.repeat_interleave(3, 0)


def direction(seed: int, size: float = 8.0, heads: int = 2) -> Tensor:
    return size * torch.nn.functional.normalize(normal(heads, 64, seed=seed), dim=-1)

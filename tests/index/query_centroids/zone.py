"""A retrieval zone on the host with an index of query centroids over it: what the tests of the index share."""

from __future__ import annotations

import torch
from torch import Tensor

from kvrecall.core.structs import Budget
from kvrecall.index.base import LayerShape
from kvrecall.index.query_centroids import CentroidConfig, CentroidIndex
from kvrecall.index.query_centroids.lists import CentroidLists
from kvrecall.select.queries import ObservedQueries
from tests.blocks import zone_of
from tests.strategies import gaussian

KV_HEADS, DIM, SCALING = 2, 64, 0.125


class Zone:
    """One sequence; its host memory has blocks of 16 rows."""

    def __init__(self, config: CentroidConfig, group: int = 3, dtype: torch.dtype = torch.float32) -> None:
        self.shape = LayerShape(1, KV_HEADS * group, KV_HEADS, DIM, dtype, torch.device("cpu"))
        self.pool = zone_of(KV_HEADS, DIM, dtype)
        self.index: CentroidIndex = config.build(self.shape)
        self.index.bind([self.pool])

    def add(self, keys: Tensor, at_once: int = 16) -> None:
        """Tokens with the keys `[2, n, D]` come to the zone."""
        for part in keys.to(self.shape.dtype).split(at_once, 1):
            if part.shape[1]:
                self.pool.append(torch.stack([part, torch.zeros_like(part)], 2))
                self.index.append(0, part)

    @property
    def keys(self) -> Tensor:
        return torch.cat([block[:, :, 0] for block in self.pool.blocks()], 1)

    @property
    def lists(self) -> CentroidLists:
        lists = self.index._lists[0]
        assert lists is not None
        return lists

    def observe(self, queries: Tensor, start: int) -> None:
        """A prompt ends with the queries `[H_q, W, D]`, the first at position `start`; the zone begins at position 0."""
        group = self.shape.query_heads // KV_HEADS
        logits = queries.float() @ self.keys.float().repeat_interleave(group, 0).transpose(-1, -2) * SCALING
        ends = torch.arange(start, start + queries.shape[1]).unsqueeze(1)
        logits = logits.masked_fill(torch.arange(logits.shape[-1]) > ends, float("-inf"))
        self.index.end_of_prompt(0, ObservedQueries(queries, torch.logsumexp(logits, -1), start), 0)

    def search(self, query: Tensor, top_k: int) -> list[list[int]]:
        """Ids per KV head."""
        found = self.index.search(query.unsqueeze(0), Budget(top_k, SCALING), [0])
        assert found.ids.dtype == found.counts.dtype == torch.int32
        ids = [found.ids[0, h, : int(found.counts[0, h])].tolist() for h in range(KV_HEADS)]
        assert all((found.ids[0, h, len(own) :] == -1).all() for h, own in enumerate(ids))
        return ids


def prompt(
    config: CentroidConfig, seed: int, tokens: int, window: int = 20, group: int = 3, dtype: torch.dtype = torch.float32
) -> Zone:
    """A zone of `tokens` Gaussian keys, its prompt's last `window` queries observed."""
    zone = Zone(config, group, dtype)
    zone.add(gaussian(seed, KV_HEADS, tokens, DIM))
    window = min(window, tokens)
    zone.observe(gaussian(seed + 1, KV_HEADS * group, window, DIM).to(dtype), tokens - window)
    return zone


def query_of(seed: int, group: int = 3, dtype: torch.dtype = torch.float32) -> Tensor:
    return (2 * gaussian(seed + 1000, KV_HEADS * group, DIM)).to(dtype)

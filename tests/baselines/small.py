"""The baselines with small parts, in one way of sharing a search each, for the invariants and their own tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvrecall import methods
from kvrecall.layer.pipeline import decode_step, prefill_layer
from kvrecall.methods import Method
from tests.one_layer import ZONES, dense, layer, normal, params

SMALL: dict[str, dict[str, Any]] = {
    "arkvale": {"page_tokens": 4},
    "freekv": {"page_tokens": 4, "threshold": 0.05},
    "h2o": {},
    "magicpig": {"bits": 4, "tables": 12, "dense_layers": ()},
    "pqcache": {"bits": 3},
    "quest": {"page_tokens": 3, "dense_layers": ()},
    "raas": {"page_tokens": 3},
    "retroinfer": {"cluster_tokens": 4, "stretch_tokens": 32},
    "shadowkv": {"page_tokens": 2, "outlier_pages": 2},
    "snapkv": {"window_tokens": 8},
    "snapkv+": {"window_tokens": 8, "refresh_interval": 6},
    "socket": {"bits": 6, "tables": 20},
    "streaming": {"top_k": 0},
    "twilight": {"page_tokens": 3, "dense_layers": (), "p": 1.0},
}
"""Parameters by name; all registered baselines are here."""

KEEPS_NOTHING = ("streaming",)
"""Whatever the budget, the retrieval zone is not attended."""
SAMPLES = ("magicpig",)
"""A search returns what chance returns, at most the budget; a sample of a zone that the budget covers is not the zone."""
CHOSEN_ONCE = ("snapkv", "snapkv+")
"""No search: the zone is attended as far as it was chosen, so tokens that arrive after the choice are not."""


def small(name: str, **changes: Any) -> Method:
    """A baseline with small zones and parts."""
    return methods.get(name, **{**ZONES, **SMALL[name], **changes})


def baselines(top_k: int) -> dict[str, Method]:
    """Every baseline with a budget of `top_k` tokens."""
    made = {name: small(name, **({} if name in KEEPS_NOTHING else {"top_k": top_k})) for name in SMALL}
    return made | {
        f"{name}-per_head": small(name, top_k=top_k, gqa="per_head") for name in ("quest", "h2o", "raas", "twilight", "socket")
    }


class Course:
    """One sequence of a layer with 6 query and 2 KV heads: a random prompt, then random steps whose queries drift.

    Remembers all queries `[6, n, D]`, keys and values `[2, n, D]`, and the length of the retrieval zone that the last step saw.
    """

    def __init__(self, method: Method, length: int = 90, seed: int = 0, dim: int = 64, drift: float = 1.0) -> None:
        self.state, self.dim, self.seed, self.drift = layer(method, dim=dim), dim, seed, drift
        self.queries, self.keys, self.values = (normal(h, length, dim, seed=seed + i) for i, h in enumerate((6, 2, 2)))
        self.queries = 2 * self.queries
        self.zone, self.sink = 0, method.sink_tokens
        prefill_layer(self.state, self.queries[None], self.keys[None], self.values[None], None, params(dim))

    def read(self, length: int) -> None:
        """A further prompt of `length` random tokens."""
        at = self.queries.shape[1]
        q, k, v = (normal(h, length, self.dim, seed=self.seed + 1000 + 3 * at + i) for i, h in enumerate((6, 2, 2)))
        self._add(q, k, v)
        prefill_layer(self.state, q[None], k[None], v[None], None, params(self.dim))

    def crop(self, tokens: int) -> None:
        """Forgets all but the first `tokens` tokens."""
        self.queries, self.keys, self.values = (x[:, :tokens] for x in (self.queries, self.keys, self.values))
        self.state.crop(0, tokens)

    def step(self) -> Tensor:
        """One decode step; returns its output `[6, D]`."""
        at = self.queries.shape[1]
        q, k, v = (normal(h, 1, self.dim, seed=self.seed + 1000 + 3 * at + i) for i, h in enumerate((6, 2, 2)))
        q = self.queries[:, -1:] * (1 - self.drift) + 2 * self.drift * q
        self.zone = self.state.store.zones(0).retrieval
        self._add(q, k, v)
        return decode_step(self.state, q[None], k[None], v[None], None, params(self.dim))[0, :, 0]

    def _add(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        pairs = (self.queries, q), (self.keys, k), (self.values, v)
        self.queries, self.keys, self.values = (torch.cat(pair, 1) for pair in pairs)

    def zone_keys(self) -> Tensor:
        """float64 keys `[2, zone, D]` of the retrieval zone that the last step saw."""
        return self.keys[:, self.sink : self.sink + self.zone].double()

    def query(self, head: int, back: int = 1) -> Tensor:
        """float64 queries `[3, D]` of a KV head's group, of the last step or `back` - 1 before it."""
        return self.queries[3 * head : 3 * head + 3, -back].double()

    def found(self) -> list[list[int]]:
        """What the last step attended to in the retrieval zone, per KV head, ascending."""
        return [sorted(x for x in row if x >= 0) for row in self.state.attended_ids(0).tolist()]

    def expected(self, attended: list[list[int]]) -> Tensor:
        """Attention of the last query to these tokens of the zone and to what is resident, `[6, D]`."""
        total, out = self.keys.shape[1], []
        for h in range(2):
            at = [*range(self.sink), *(self.sink + i for i in attended[h]), *range(self.sink + self.zone, total)]
            q, k, v = self.queries[3 * h : 3 * h + 3, -1], self.keys[h : h + 1, at], self.values[h : h + 1, at]
            out.append(dense(q, k, v))
        return torch.cat(out)


def best(scores: Sequence[float], count: int) -> list[int]:
    """Places of the largest scores, ascending; ties to the lower place."""
    return sorted(sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:count])


def taken(units: Sequence[Sequence[int]], scores: Sequence[float], budget: int) -> list[int]:
    """Tokens of the best units until the budget is full; ties to the lower unit."""
    ids: list[int] = []
    for unit in sorted(range(len(units)), key=lambda i: (-scores[i], i)):
        ids += list(units[unit])[: budget - len(ids)]
    return sorted(ids)


def shared(scores: Tensor, mode: str, scaling: float) -> list[float]:
    """Ranking score of a group from its heads' float64 scores `[3, U]`."""
    shares = (scores * scaling).softmax(-1)
    return (shares.mean(0) if mode == "mean_softmax" else shares.amax(0)).tolist()

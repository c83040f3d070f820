"""One sequence of a small layer, stepped beside loops that say what a method selects and gives."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvrecall.layer.pipeline import decode_step, prefill_layer
from kvrecall.methods import Method
from tests.one_layer import dense, layer, normal, params


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


def resident_plus(course: Course, zone: list[list[int]], out: torch.Tensor) -> None:
    assert course.found() == zone
    torch.testing.assert_close(out, course.expected(zone), atol=1e-5, rtol=1e-5)


def weighted(course: Course, head: int, terms: list[tuple[Tensor, Tensor, float]]) -> Tensor:
    """Attention `[D]` of a query head over what is resident and over terms of (key, value, logarithm of the weight)."""
    total, h = course.keys.shape[1], head // 3
    for at in [*range(course.sink), *range(course.sink + course.zone, total)]:
        terms = [*terms, (course.keys[h, at].double(), course.values[h, at].double(), 0.0)]
    query = course.queries[head, -1].double()
    logits = torch.stack([key @ query * course.dim**-0.5 + bias for key, _, bias in terms])
    return (logits.softmax(0) @ torch.stack([value for _, value, _ in terms])).float()

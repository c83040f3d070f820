"""What a layer's keys and queries have in common in every text: the rotary embedding, and the statistics before it.

Both together give mean and covariance of the keys at any position, also at positions that were never seen, because keys drift
with their position only by the rotary embedding.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from kvrecall.core.archive import Archive
from kvrecall.index.enough import ENOUGH_TOKENS


class Rotary(ABC):
    """A layer's rotary embedding, a linear map of a head's D coordinates that depends only on the position p:

    x[i] at position p becomes cos[p, i] x[i] + sin[p, i] x[partner[i]].

    Coordinates without a rotation have cos 1 and sin 0. Some models also scale: then cos^2 + sin^2 is not 1.
    """

    partner: Tensor
    """int64 `[D]` on the CPU; a coordinate without rotation is its own partner."""

    positions: int | None = None
    """How many positions it knows; None: any number."""

    @abstractmethod
    def turns(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        """(cos, sin) of the positions first .. first + count - 1, fp32 `[count, D]`, on the CPU; sin has the sign."""

    @property
    def turns_nothing(self) -> bool:
        """Whether keys are the same at all positions."""
        return False


class NoRotary(Rotary):
    """The embedding of a layer that does not rotate its keys."""

    def __init__(self, dim: int) -> None:
        self.partner = torch.arange(dim)

    def turns(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        shape = count, self.partner.shape[0]
        return torch.ones(shape), torch.zeros(shape)

    @property
    def turns_nothing(self) -> bool:
        return True


def turn(x: Tensor, cos: Tensor, sin: Tensor, partner: Tensor) -> Tensor:
    """Applies the rotary embedding to vectors `[..., n, D]`, with cos and sin `[n, D]` of their positions."""
    return cos * x + sin * x[..., partner]


def turn_back(x: Tensor, cos: Tensor, sin: Tensor, partner: Tensor) -> Tensor:
    """The inverse of `turn`, where there is one."""
    # A pair (i, j): y_i = c_i x_i + s_i x_j and y_j = c_j x_j + s_j x_i.
    alone = partner == torch.arange(len(partner), device=partner.device)
    other = cos[..., partner]
    determinant = torch.where(alone, cos, cos * other - sin * sin[..., partner])
    return torch.where(alone, x, other * x - sin * x[..., partner]) / torch.where(determinant == 0, 1.0, determinant)


@dataclass(frozen=True)
class KeyStatistics:
    """Statistics of one layer's keys and queries before the rotary embedding, fp64 on the CPU.

    key_mean `[H_kv, D]`; key_covariance `[H_kv, D, D]`; query_second `[H_kv, D, D]`, about zero, of the query heads of
    each KV head together. tokens: how many tokens they come from; 0: nothing is known.
    """

    tokens: int
    key_mean: Tensor
    key_covariance: Tensor
    query_second: Tensor

    @property
    def key_second(self) -> Tensor:
        """Second moments of the keys about zero, `[H_kv, D, D]`."""
        return self.key_covariance + self.key_mean.unsqueeze(-1) * self.key_mean.unsqueeze(-2)

    def of_heads(self, first: int, count: int) -> KeyStatistics:
        """The statistics of consecutive KV heads, for example of one rank."""
        mine = slice(first, first + count)
        return KeyStatistics(self.tokens, self.key_mean[mine], self.key_covariance[mine], self.query_second[mine])

    @staticmethod
    def nothing(kv_heads: int, dim: int) -> KeyStatistics:
        """Statistics of no token."""
        square = torch.zeros(kv_heads, dim, dim, dtype=torch.float64)
        return KeyStatistics(0, torch.zeros(kv_heads, dim, dtype=torch.float64), square, square)


KEPT_TENSORS = {"key_mean": 1, "key_covariance": 2, "query_second": 2}
"""The tensors of `KeyStatistics` in files, each `[H_kv, D]` or `[H_kv, D, D]`: name -> how many dimensions of D."""

Mark = tuple[int, tuple[Tensor, ...] | None]
"""(tokens, sums over them); never changed in place."""


class LayerCalibration:
    """A layer's rotary embedding and key statistics. Statistics are gathered from the first tokens unless they are given.

    Settled statistics never change, so codes that were written with them stay valid.
    """

    def __init__(self, rotary: Rotary, statistics: KeyStatistics | None = None) -> None:
        self.rotary, self._lock = rotary, Lock()  # forks may decode in threads of their own
        self._settled = statistics
        self._tokens = 0
        self._sums: tuple[Tensor, ...] | None = None
        self.made: dict[Any, Any] = {}
        """What indexes have computed from the settled statistics, by their settings; shared by all indexes."""

    @property
    def settled(self) -> bool:
        """Whether the statistics are final."""
        return self._settled is not None

    @property
    def tokens(self) -> int:
        """How many tokens the statistics come from, or have come from so far."""
        return self._tokens if self._settled is None else self._settled.tokens

    def see(self, keys: Tensor, queries: Tensor | None, first: int) -> None:
        """Adds tokens to the statistics: post-RoPE keys `[H_kv, n, D]` and queries `[H_q, n, D]` from position `first` on.

        Without queries all their directions count as equally likely. Does nothing if the statistics are settled or come
        from `ENOUGH_TOKENS` tokens."""
        with self._lock:
            count = min(keys.shape[1], ENOUGH_TOKENS - self._tokens)
            if self.settled or count <= 0:
                return
            sums = self._sums_of(keys, queries, first, count)
            if self._sums is not None:
                sums = tuple(a + b for a, b in zip(self._sums, sums, strict=True))
            self._sums, self._tokens = sums, self._tokens + count

    def _sums_of(self, keys: Tensor, queries: Tensor | None, first: int, count: int) -> tuple[Tensor, ...]:
        """Sums over the first `count` tokens, fp64: of keys `[H_kv, D]`; of outer products of keys, and of queries,
        `[H_kv, D, D]`."""
        # Turns of all positions, since some kinds of scaling look at the longest one of a call.
        cos, sin = (x[:count].to(keys.device, torch.float64) for x in self.rotary.turns(first, keys.shape[1]))
        partner = self.rotary.partner.to(keys.device)
        k = turn_back(keys[:, :count].double(), cos, sin, partner)
        of_queries = k.new_zeros(k.shape[0], k.shape[2], k.shape[2])
        if queries is not None:
            heads = keys.shape[0]
            q = turn_back(queries[:, :count].double(), cos, sin, partner).unflatten(0, (heads, -1)).flatten(1, 2)
            of_queries = q.mT @ q * (heads / queries.shape[0])
        return k.sum(1), k.mT @ k, of_queries

    def mark(self) -> Mark:
        """The sums so far, for `rewind`."""
        with self._lock:
            return self._tokens, self._sums

    def rewind(self, mark: Mark) -> None:
        """Forgets the tokens since `mark`, unless the statistics are settled."""
        with self._lock:
            if not self.settled:
                self._tokens, self._sums = mark

    def archive(self, archive: Archive, kv_heads: int, dim: int) -> None:
        """Saves or loads the statistics, or the sums so far; see `core.archive`."""
        shapes = [(kv_heads, dim), (kv_heads, dim, dim), (kv_heads, dim, dim)]
        with self._lock:
            known = self._settled
            tokens = archive.integer("tokens", self._tokens if known is None else known.tokens)
            if archive.flag("settled", known is not None):
                held = [None] * 3 if known is None else [known.key_mean, known.key_covariance, known.query_second]
                named = zip(KEPT_TENSORS, held, shapes, strict=True)
                made = [archive.tensor(name, part, shape, torch.float64).cpu() for name, part, shape in named]
                self._settled = known or KeyStatistics(tokens, *made)
            elif archive.has("sums", self._sums):
                sums = self._sums or [None] * 3
                named = zip(KEPT_TENSORS, sums, shapes, strict=True)
                self._sums = tuple(archive.tensor(name, part, shape, torch.float64) for name, part, shape in named)
                self._tokens = tokens

    def settle(self, kv_heads: int, dim: int) -> KeyStatistics:
        """Makes the statistics final, rounded to fp32 as in files, and returns them.

        If the sums are not finite, the statistics count as unknown."""
        with self._lock:
            if self._settled is None:
                made = None if self._sums is None else _moments(*(x.cpu() / self._tokens for x in self._sums))
                finite = made is not None and all(bool(x.isfinite().all()) for x in made)
                self._settled = KeyStatistics(self._tokens, *made) if made and finite else KeyStatistics.nothing(kv_heads, dim)
                self._sums = None
            return self._settled


def _moments(mean: Tensor, second: Tensor, queries: Tensor) -> list[Tensor]:
    """(mean, covariance, the queries' second moments), rounded to fp32; second: of the keys, about zero, in fp64."""
    covariance = second - mean.unsqueeze(-1) * mean.unsqueeze(-2)
    size = second.diagonal(dim1=-2, dim2=-1).sqrt()
    noise = 1e-12 * size.unsqueeze(-1) * size.unsqueeze(-2)  # rounding error of keys that are all equal
    covariance = torch.where(covariance.abs() <= noise, 0.0, covariance)
    return [x.float().double() for x in (mean, covariance, queries)]

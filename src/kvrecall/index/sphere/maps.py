"""What is done to keys and queries before they are coded: a centre and a balanced transform per sequence and KV head.

Inner products stay as they are when keys are multiplied by S^-1 and queries by S, and their order for one query when a
constant vector is taken from every key; but sign bits say most about vectors whose coordinates matter equally. With the keys'
covariance C = V L V^T (about zero where no centre is taken), S = L^(1/4) V^T divides what a direction is worth evenly between
keys and queries.

    k' = R L^(-1/4) V^T (k - c)      q' = R L^(1/4) V^T q      <q', k'> = <q, k> - <q, c>

Not from the paper. Ranking never depends on how well a map fits, only the resolution of the codes does: it may stay fixed.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from typing import NamedTuple

import torch
from torch import Tensor

from kvrecall.index.base import LayerShape
from kvrecall.structs import lasting_tensors

LEAST_VARIANCE = 1e-4
"""Smallest variance of a direction that is believed, as a share of the mean: less is rounding, or too few keys."""


class Moments:
    """Count, mean and scatter of keys that come in pieces, fp64, so that huge keys do not overflow."""

    def __init__(self, scatter: bool = True) -> None:
        """scatter: whether the D x D part is wanted, which costs 2 D^2 operations per key."""
        self.count, self.mean, self.scatter = 0, torch.zeros(()), torch.zeros(()) if scatter else None

    def add(self, keys: Tensor) -> Moments:
        """Takes in keys `[H_kv, n, D]` of any float dtype, n > 0; mean `[H_kv, D]`, scatter about it `[H_kv, D, D]`."""
        keys, count = keys.double(), keys.shape[1]
        mean = keys.mean(1)
        total, delta = self.count + count, mean - self.mean.to(mean)
        if self.scatter is not None:
            apart = keys - mean.unsqueeze(1)
            between = delta.unsqueeze(-1) * delta.unsqueeze(-2) * (self.count * count / total)
            self.scatter = self.scatter.to(mean) + apart.mT @ apart + between
        self.mean = self.mean.to(mean) + delta * (count / total)
        self.count = total
        return self

    def second(self, centred: bool) -> Tensor:
        """Second moments of a key about the mean, or (not `centred`) about zero, fp64 `[H_kv, D, D]` on the CPU."""
        assert self.scatter is not None
        about = self.scatter / max(self.count, 1)
        return (about if centred else about + self.mean.unsqueeze(-1) * self.mean.unsqueeze(-2)).cpu()


class Fitted(NamedTuple):
    """keys, queries: fp64 `[H_kv, D, D]` on the CPU; a key `k` becomes `keys @ k`, a query `queries @ q`."""

    keys: Tensor
    queries: Tensor


def fit(keys: Tensor, count: int, queries: Tensor | None = None) -> Fitted:
    """The balanced transform, before the shared rotation: `keys.T @ queries` is the identity.

    keys: second moments of `count` keys as they will be coded, fp64 `[H_kv, D, D]` on the CPU. Fewer than 2 D keys know little
    of them, so that they are then drawn towards a multiple of the identity.
    queries: second moments E[q q^T] of the queries that will come, of the same shape; None takes all directions as equally
    likely. S^2 is the geometric mean of C_k and C_q^-1, which leaves both sides with the same second moments.
    """
    dim = keys.shape[-1]
    known = min(1.0, count / (2 * dim))
    values, vectors = _spectrum(known * keys + (1 - known) * _mean_variance(keys)[..., None, None] * torch.eye(dim).double())
    if queries is None:
        root = values**0.25
    else:
        half = _power(*_spectrum(queries), 0.5)
        inner = _power(*_spectrum(half @ _power(values, vectors, 1.0) @ half), 0.5)
        back = torch.linalg.inv(half)
        values, vectors = _spectrum(back @ inner @ back)
        root = values**0.5
    return Fitted(vectors.mT / root.unsqueeze(-1), vectors.mT * root.unsqueeze(-1))


def _mean_variance(matrix: Tensor) -> Tensor:
    return matrix.diagonal(dim1=-2, dim2=-1).mean(-1)


def _spectrum(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues `[H, D]` as shares of their mean, none below LEAST_VARIANCE (all 1 for a zero matrix), and eigenvectors."""
    mean = _mean_variance(matrix)[..., None, None]
    even = torch.eye(matrix.shape[-1], dtype=torch.float64).expand_as(matrix)
    values, vectors = torch.linalg.eigh(torch.where(mean > 0, matrix / torch.where(mean > 0, mean, 1.0), even))
    return values.clamp_min(LEAST_VARIANCE), vectors


def _power(values: Tensor, vectors: Tensor, exponent: float) -> Tensor:
    return (vectors * values.unsqueeze(-2) ** exponent) @ vectors.mT


class Maps:
    """The maps of a layer in device memory that never moves: a captured graph reads them.

    centres: fp32 `[B, H_kv, D]`, or None. keys, queries: fp32 `[B, H_kv, D, D]`, or `[D, D]` where all share the rotation.
    """

    def __init__(self, shape: LayerShape, rotation: Tensor, center: bool, balance: bool) -> None:
        self.rotation, self._balance = rotation, balance
        each = (shape.sequences, shape.kv_heads)
        self.centres: Tensor | None = None
        self.keys = self.queries = rotation
        with lasting_tensors():
            if center:
                self.centres = torch.zeros(*each, rotation.shape[0], device=rotation.device)
            if balance:
                self.keys, self.queries = (rotation.repeat(*each, 1, 1) for _ in range(2))
        self.fitted = [not (center or balance)] * shape.sequences
        """Per sequence, whether its maps are what they will be."""

    @property
    def stride(self) -> int:
        """Numbers between the maps of one KV head and the next: 0 where all share one."""
        return self.rotation.numel() if self._balance else 0

    @property
    def nbytes(self) -> int:
        """Bytes beside the shared rotation."""
        maps = self.keys.nbytes + self.queries.nbytes if self._balance else 0
        return maps + (0 if self.centres is None else self.centres.nbytes)

    @staticmethod
    def nbytes_per_head(head_dim: int, center: bool, balance: bool) -> int:
        """The same per sequence and KV head: 2 D^2 + D numbers of fp32."""
        return 4 * (2 * head_dim**2 * balance + head_dim * center)

    def fit(self, sequence: int, pieces: Iterable[Tensor]) -> None:
        """Fits a sequence's maps to keys `[H_kv, n, D]` that come in pieces; nothing is changed if one of them fails."""
        moments = Moments(self._balance)
        for keys in pieces:
            if keys.shape[1]:
                moments.add(keys)
        if not moments.count:
            return
        if self._balance:
            made, turn = fit(moments.second(self.centres is not None), moments.count), self.rotation.cpu().double()
            self.keys[sequence] = (turn @ made.keys).float().to(self.keys.device)
            self.queries[sequence] = (turn @ made.queries).float().to(self.keys.device)
        if self.centres is not None:
            self.centres[sequence] = moments.mean.float()
        self.fitted[sequence] = True

    def forget(self, sequence: int) -> None:
        """The next keys are the first of a new text."""
        self.fitted[sequence] = self.centres is None and not self._balance

    def select(self, sequences: list[int]) -> Maps:
        """Maps whose sequence i is this one's `sequences[i]`, sharing nothing that either may change."""
        chosen = copy(self)
        chosen.fitted = [self.fitted[b] for b in sequences]
        with lasting_tensors():
            at = torch.tensor(sequences, device=self.rotation.device)
            if self.centres is not None:
                chosen.centres = self.centres[at]
            if self._balance:
                chosen.keys, chosen.queries = self.keys[at], self.queries[at]
        return chosen

    def of_keys(self, sequence: int) -> tuple[Tensor, Tensor | None]:
        """Map `[D, D]` or `[H_kv, D, D]` and centre `[H_kv, D]` (or None) of one sequence's keys."""
        return self.keys[sequence] if self._balance else self.keys, None if self.centres is None else self.centres[sequence]

    def turn(self, queries: Tensor, sequences: list[int]) -> Tensor:
        """Queries fp32 `[b, H_kv, G', D]` as the codes want them."""
        # One product per sequence: a batched one may round differently, and a sequence must find what it finds alone.
        pairs = zip(queries, sequences, strict=True)
        return torch.stack([query @ (self.queries[b] if self._balance else self.queries).mT for query, b in pairs])

    def shifts(self, queries: Tensor, sequences: list[int]) -> Tensor | None:
        """<q, c>, which estimates lack, fp32 `[b, H_kv, G']`; None without centres."""
        if self.centres is None:
            return None
        return torch.stack([(q * self.centres[b].unsqueeze(1)).sum(-1) for q, b in zip(queries, sequences, strict=True)])

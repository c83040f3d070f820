"""SOCKET: SOft Collision Kernel EsTimator for Sparse Attention (Joshi et al., 2026)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvrecall.baselines.socket.index import SoftHashConfig
from kvrecall.methods.base import Method


@dataclass(frozen=True, kw_only=True)
class SOCKET(Method):
    """Each key falls into one bucket per table, a query into every bucket with a probability, so that near misses count.

    1. `tables` tables of `bits` random hyperplanes put each key into one bucket per table, by the signs of its projections.
    2. A query falls into every bucket with a probability: the softmax over the buckets of its agreement with their signs,
       at a `temperature`.
    3. A token's score is the sum over the tables of its bucket's probability, times the norm of its value; the best `top_k`
       are fetched. A group is ranked by the mean of its heads' shares.

    seed: of the hyperplanes. Simplified: written from a summary of the paper (12 planes, 60 tables, temperature 0.3, value
    norms). Chosen here: the query is normalised, and a bucket's signs are scaled to a unit vector before the temperature.
    Source: that summary; parameters as given there.
    """

    name: ClassVar[str] = "socket"
    paper: ClassVar[str] = "SOCKET: SOft Collision Kernel EsTimator for Sparse Attention"

    bits: int = 12
    tables: int = 60
    temperature: float = 0.3
    seed: int = 42

    top_k: int | None = 1024

    def own_index(self) -> SoftHashConfig:
        return SoftHashConfig(bits=self.bits, tables=self.tables, temperature=self.temperature, seed=self.seed)

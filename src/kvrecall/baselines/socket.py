"""SOCKET: SOft Collision Kernel EsTimator for Sparse Attention (Joshi et al., 2026).

In the index a key falls into one bucket per table, a query into all of them, each with a probability. A token's score is the
sum over the tables of the probability that the query falls into its bucket, times the norm of its value.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvrecall.cache.copies import zone_rows
from kvrecall.core.errors import ParameterError
from kvrecall.index.base import IndexConfig, LayerShape
from kvrecall.index.hashing import check_tables, hash_codes, hyperplanes, patterns
from kvrecall.index.table import TokenTable
from kvrecall.index.tokens import TableIndex
from kvrecall.methods.base import Method

_SCORED_TOKENS = 2048
"""Tokens scored at a time: bounds the probabilities in flight to H_kv * G * 2048 * tables * 8 bytes."""


@dataclass(frozen=True)
class SoftHashConfig(IndexConfig):
    """bits, tables: hyperplanes per table, and tables. temperature (tau): of the query's softmax over the buckets of a table.
    seed: of the hyperplanes."""

    name: ClassVar[str] = "soft-hash"
    pages_refusal: ClassVar[str] = "it weighs tokens by their values, and pages are written from keys alone"
    in_blocks: ClassVar[bool] = True

    bits: int = 12
    tables: int = 60
    temperature: float = 0.3
    seed: int = 42

    def __post_init__(self) -> None:
        super().__post_init__()
        check_tables(self, "SOCKET uses 60 tables of 12 bits.")
        if not isinstance(self.temperature, int | float) or not self.temperature > 0:
            raise ParameterError("temperature", "a number > 0", self.temperature, "SOCKET uses 0.3.")

    def build(self, shape: LayerShape) -> SoftHashIndex:
        return SoftHashIndex(shape, self)

    def nbytes(self, shape: LayerShape, tokens: int) -> int:
        return shape.kv_heads * tokens * (2 * self.tables + 4)


class SoftHashIndex(TableIndex):
    """Codes of the keys and norms of the values of one layer."""

    def __init__(self, shape: LayerShape, config: SoftHashConfig) -> None:
        of, size = ("soft hashes", config.bits, config.seed), (shape.sequences, shape.kv_heads)
        codes = TokenTable(of, *size, config.tables, torch.int16, shape.device)
        norms = TokenTable("norms of values", *size, 1, torch.float32, shape.device)
        super().__init__(shape, config, codes=codes, norms=norms)
        self._config = config
        self._planes = hyperplanes(shape.head_dim, config.tables, config.bits, config.seed, shape.device)

    def append(self, sequence: int, keys: Tensor) -> None:
        """Reads the values from the host for their norms; rows are stored before their keys are appended."""
        start = self.lengths[sequence]
        if keys.shape[1]:
            values = zone_rows(self._sources[sequence], start, start + keys.shape[1])[:, :, 1]
            self.tables["codes"].append(sequence, hash_codes(keys, self._planes))
            self.tables["norms"].append(sequence, values.to(keys.device).float().norm(dim=-1, keepdim=True))

    def score(self, queries: Tensor, sequence: int, scaling: float) -> Tensor:
        """The logarithm of the soft collisions, so that a softmax gives each head's shares of its total."""
        tables = bucket_probabilities(queries, self._planes, self._config.temperature)
        codes, norms = (self.tables[name].stored(sequence) for name in ("codes", "norms"))
        mass = soft_collisions(tables, codes.pieces(_SCORED_TOKENS)) * norms.gather().transpose(1, 2).double()
        return (mass.clamp_min(1e-300).log() / scaling).float()


def bucket_probabilities(queries: Tensor, planes: Tensor, temperature: float) -> Tensor:
    """fp64 `[H_kv, G', tables, 2^bits]`: softmax over the buckets of <projections of the unit query, sides of the bucket> /
    (sqrt(bits) temperature), for queries fp32 `[H_kv, G', D]`."""
    units = torch.nn.functional.normalize(queries.double(), dim=-1)
    projected = torch.einsum("hgd,tbd->hgtb", units, planes.double())
    bits = planes.shape[1]
    return (projected @ patterns(bits, planes.device).T / (bits**0.5 * temperature)).softmax(-1)


def soft_collisions(tables: Tensor, codes: Iterable[Tensor]) -> Tensor:
    """fp64 `[H_kv, G', n]`: sum over the tables of the probability of each token's bucket; codes: int16 `[H_kv, ·, tables]`, of
    n tokens in all."""
    heads, group = tables.shape[:2]
    pieces = [torch.zeros(heads, group, 0, dtype=torch.float64, device=tables.device)]
    for piece in (piece for block in codes for piece in block.split(_SCORED_TOKENS, dim=1)):
        at = piece.long().transpose(1, 2).unsqueeze(1).expand(-1, group, -1, -1)  # [H_kv, G', tables, n]
        pieces.append(tables.gather(-1, at).sum(2))
    return torch.cat(pieces, -1)


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

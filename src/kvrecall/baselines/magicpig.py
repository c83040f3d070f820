"""MagicPIG: LSH Sampling for Efficient LLM Generation (Chen et al., 2024).

The index samples tokens by locality-sensitive hashing. Keys are centred by the mean of the prompt's keys, which shifts all
logits equally. A query head takes the tokens that share its bucket in at least two tables. With p = 1 - angle / pi and a =
p^bits a token is taken with probability u = 1 - (1 - a)^tables - tables a (1 - a)^(tables - 1), and log u is subtracted from
its logit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from kvrecall.core.structs import Budget, Selection
from kvrecall.index.base import IndexConfig, LayerShape
from kvrecall.index.hashing import check_tables, hash_codes, hyperplanes
from kvrecall.index.tokens import TrainedIndex
from kvrecall.methods.base import Method

_COMPARED_TOKENS = 2048
"""Tokens compared at a time: bounds the comparisons in flight to H_kv * G * 2048 * tables bytes."""


@dataclass(frozen=True)
class SamplingConfig(IndexConfig):
    """bits (K), tables (L): hyperplanes per table, and tables. seed: of the hyperplanes. gqa: each query head samples
    for itself.

    `top_k` bounds a head's sample: tokens with the most common buckets stay, ties go to the lower position.
    """

    name: ClassVar[str] = "hash-sampling"
    pages_refusal: ClassVar[str] = "its hashes follow from the mean key of a whole prompt"
    modes: ClassVar[tuple[str, ...]] = ("per_head",)
    weighs: ClassVar[bool] = True

    gqa: str = "per_head"
    bits: int = 10
    tables: int = 150
    seed: int = 42

    def __post_init__(self) -> None:
        super().__post_init__()
        check_tables(self, "MagicPIG uses 150 tables of 10 bits.")

    @classmethod
    def refusal(cls, mode: str) -> str:
        return "A token's weight is the probability with which one head samples it; a group has none."

    def build(self, shape: LayerShape) -> SamplingIndex:
        return SamplingIndex(shape, self)

    def nbytes(self, shape: LayerShape, tokens: int) -> int:
        return shape.kv_heads * (2 * self.tables * tokens + 4 * shape.head_dim)


class SamplingIndex(TrainedIndex):
    """Learns the mean key fp32 `[H_kv, 1, D]`, and keeps int16 codes of the centred keys."""

    def __init__(self, shape: LayerShape, config: SamplingConfig) -> None:
        super().__init__(shape, config, config.tables, torch.int16)
        self._config = config
        self._planes = hyperplanes(shape.head_dim, config.tables, config.bits, config.seed, shape.device)

    @property
    def trained_shape(self) -> tuple[int, ...]:
        return self._kv_heads, 1, self._planes.shape[2]

    def train(self, keys: Tensor) -> Tensor:
        return keys.double().mean(1, keepdim=True).float()

    def encode(self, keys: Tensor, trained: Tensor) -> Tensor:
        return hash_codes(keys.float() - trained, self._planes)

    def score(self, queries: Tensor, sequence: int, scaling: float) -> Tensor:
        """Number of tables in which a token shares the bucket of a head's query; -inf below two."""
        if self.trained(sequence) is None:
            return queries.new_empty(*queries.shape[:2], 0)
        shared = collisions(hash_codes(queries, self._planes), self.codes(sequence))
        return shared.masked_fill(shared < 2, float("-inf"))

    def search(self, queries: Tensor, budget: Budget, sequences: list[int]) -> Selection:
        selection = super().search(queries, budget, sequences)
        grouped = queries.float().unflatten(1, (self._kv_heads, -1))
        biases = [self._bias(q, ids, b) for q, ids, b in zip(grouped, selection.ids, sequences, strict=True)]
        return replace(selection, bias=torch.stack(biases))

    def _bias(self, queries: Tensor, ids: Tensor, sequence: int) -> Tensor:
        """-log u fp32 `[H_q, K]` of ids int32 `[H_kv, K]`, -inf for tokens that a head has not sampled. Reads the keys."""
        mean = self.trained(sequence)
        if mean is None or not ids.shape[1]:
            return queries.new_empty(queries.shape[0] * queries.shape[1], ids.shape[1])
        at = ids.long().clamp_min(0)
        keys = self._sources[sequence].gather(at.cpu())[:, :, 0].to(queries.device).float() - mean
        codes = self.codes(sequence).gather(1, at.unsqueeze(-1).expand(-1, -1, self._config.tables))
        taken = (collisions(hash_codes(queries, self._planes), codes) >= 2) & (ids >= 0).unsqueeze(1)
        cosines = torch.cosine_similarity(queries.double().unsqueeze(2), keys.double().unsqueeze(1), dim=-1)
        chance = sampling_probability(cosines, self._config.bits, self._config.tables)
        return torch.where(taken, -chance.clamp_min(1e-12).log(), float("-inf")).float().flatten(0, 1)


def collisions(queries: Tensor, keys: Tensor) -> Tensor:
    """Number of tables in which codes agree, fp32 `[H_kv, G', n]`; queries: int16 `[H_kv, G', tables]`, keys:
    `[H_kv, n, tables]`."""
    pieces = [torch.zeros(*queries.shape[:2], 0, device=queries.device, dtype=torch.float32)]
    for piece in keys.split(_COMPARED_TOKENS, dim=1):
        pieces.append((queries.unsqueeze(2) == piece.unsqueeze(1)).sum(-1).float())
    return torch.cat(pieces, -1)


def sampling_probability(cosines: Tensor, bits: int, tables: int) -> Tensor:
    """Probability that two vectors share a bucket in at least two of `tables` tables, from their cosine, fp64."""
    same = (1 - cosines.double().clamp(-1, 1).acos() / torch.pi) ** bits
    return 1 - (1 - same) ** tables - tables * same * (1 - same) ** (tables - 1)


@dataclass(frozen=True, kw_only=True)
class MagicPIG(Method):
    """Samples tokens by hashing instead of taking the best, and corrects for each token's sampling probability.

    1. Keys, minus their mean over the prompt, are hashed into `tables` (L) tables by the signs of `bits` (K) projections.
    2. Each query head takes the tokens that share its bucket in at least two tables.
    3. Attention to them divides each weight by its sampling probability, so its expectation is full attention. It is merged
       with sink and window by log-sum-exp.
    4. Layers 0, 16, 32, 48 and 64 are dense, as in the paper's code.

    top_k: upper bound of a head's sample; its size follows from the hashes. seed: of the hyperplanes. If top_k covers the zone,
    nothing is sampled and everything is attended.
    Simplified: codes and attention are on the device (the paper's tables and attention are on the CPU); generated keys are
    hashed when they leave the window (the paper's code never hashes them). Source: the paper's text and published code.
    """

    name: ClassVar[str] = "magicpig"
    paper: ClassVar[str] = "MagicPIG: LSH Sampling for Efficient LLM Generation"

    bits: int = 10
    tables: int = 150
    seed: int = 42

    top_k: int | None = 4096
    sink_tokens: int = 4
    local_tokens: int = 64
    update_interval: int = 256
    dense_layers: tuple[int, ...] = (0, 16, 32, 48, 64)

    def own_index(self) -> SamplingConfig:
        return SamplingConfig(bits=self.bits, tables=self.tables, seed=self.seed)

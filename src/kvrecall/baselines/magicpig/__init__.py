"""MagicPIG: LSH Sampling for Efficient LLM Generation (Chen et al., 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvrecall.baselines.magicpig.index import SamplingConfig
from kvrecall.methods.base import Method


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

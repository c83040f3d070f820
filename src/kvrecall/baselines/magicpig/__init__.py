"""MagicPIG: LSH Sampling for Efficient LLM Generation (Chen et al., 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvrecall.baselines.magicpig.index import SamplingConfig
from kvrecall.methods.base import Method


@dataclass(frozen=True, kw_only=True)
class MagicPIG(Method):
    """Samples tokens by hashing instead of taking the best, and corrects for how likely each was to be sampled.

    1. Keys, less their mean over the prompt, are hashed into `tables` (L) tables by the signs of `bits` (K) projections.
    2. Each query head takes the tokens that share its bucket in at least two tables.
    3. Attention over them divides each weight by the probability of having been taken, so its expectation is that of full
       attention; it is merged with sink and window by log-sum-exp.
    4. Five layers stay dense, as in the paper's code where a model has that many.

    top_k bounds the tokens of a head; a sample is as large as the hashes make it. seed: of the hyperplanes.
    Never full attention by a budget alone: a sample is not the zone, unless top_k covers it, when nothing is sampled.
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

"""PQCache: Product Quantization-based KVCache for Long Context LLM Inference (Zhang et al., 2025)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvrecall.baselines.pqcache.index import ProductConfig
from kvrecall.fetch import Staged
from kvrecall.methods.base import Method


@dataclass(frozen=True, kw_only=True)
class PQCache(Method):
    """Scores every token from a product-quantised key.

    1. After the prompt each KV head's keys are cut into `subspaces` pieces, and k-means finds 2^`bits` centres per piece.
    2. A key is stored as the numbers of its nearest centres; later keys use the same centres.
    3. Every step adds up table entries per token, ranks by the mean over the group of the softmax, and fetches `top_k` tokens;
       rows that are still on the device are not read again (the paper's block cache).

    iterations: at most, of k-means. Simplified: k-means starts at evenly spaced keys and runs before the first step, not during
    prefill; rows are kept from one step to the next, not in a cache of blocks with LFU replacement; top_k is a number, not a
    share of the prompt (0.1 or 0.2 of it, half of that retrieved).
    Source: the paper's text and published code (2 subspaces of 6 bits).
    """

    name: ClassVar[str] = "pqcache"
    paper: ClassVar[str] = "PQCache: Product Quantization-based KVCache for Long Context LLM Inference"

    subspaces: int = 2
    bits: int = 6
    iterations: int = 10

    top_k: int | None = 1024

    def own_index(self) -> ProductConfig:
        return ProductConfig(subspaces=self.subspaces, bits=self.bits, iterations=self.iterations)

    def own_fetch(self) -> Staged:
        return Staged(reuse=True)

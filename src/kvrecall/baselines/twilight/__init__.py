"""Twilight: Adaptive Attention Sparsity with Hierarchical Top-p Pruning (Lin et al., 2025)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvrecall.baselines.twilight.index import TopP
from kvrecall.index.pages import PageConfig
from kvrecall.methods.base import Method


@dataclass(frozen=True, kw_only=True)
class Twilight(Method):
    """Searches more tokens than needed, and prunes them to the fewest that hold a share `p` of the attention.

    1. Quest's pages of `page_tokens` tokens find `top_k` tokens, more than will be needed.
    2. Low-bit codes of those keys estimate the attention to each of them; the largest that add up to `p` are fetched. So the
       number of tokens differs by step and KV head, up to top_k.
    3. The first two layers stay dense.

    `prune="top-p:p=0.9"` gives the same pruning to any other method.
    Simplified: a group is pruned by the mean of its heads' shares (`gqa="per_head"`: each head by its own, then the union,
    as in the paper); codes have one scale and offset per key; the paper's base budget is a quarter of the context, here a
    number.
    Source: the paper as summarised in comparisons (4-bit keys on top of Quest); p = 0.85 is its value for Llama 3.1.
    """

    name: ClassVar[str] = "twilight"
    paper: ClassVar[str] = "Twilight: Adaptive Attention Sparsity with Hierarchical Top-p Pruning"

    p: float = 0.85
    page_tokens: int = 16

    top_k: int | None = 8192
    dense_layers: tuple[int, ...] = (0, 1)

    def own_index(self) -> PageConfig:
        return PageConfig(page_tokens=self.page_tokens, bounds="min-max")

    def own_prune(self) -> TopP:
        return TopP(self.p)

"""RaaS: Reasoning-Aware Attention Sparsity for Efficient LLM Reasoning (Hu et al., 2025)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvrecall.baselines.raas.index import MilestoneConfig
from kvrecall.methods.base import Method


@dataclass(frozen=True, kw_only=True)
class RaaS(Method):
    """Drops the page that was useful longest ago; prompts that fit are kept.

    1. A page of `page_tokens` tokens keeps the minimum and the maximum of its keys, which bound its score.
    2. Every step stamps the best `stamp_ratio` of the remaining pages with its time.
    3. Over budget (`top_k` tokens), the pages with the oldest time are dropped and never return. So a lemma of a chain of
    thought stays as long as it is used. 4. keep_prompt: prompts, also later ones of a conversation, are never dropped. If their
    pages exceed the budget together, they compete like all others (the paper lets the budget grow instead).

    Simplified: dropped rows stay on the host; at equal times the page with the larger score stays; a group shares its pages, as
    in LouisKV section 5.1. Source: the paper as LouisKV describes it (tokens without substantial attention over a sustained
    period are evicted; pages of 16); stamping half of the pages is the paper's.
    """

    name: ClassVar[str] = "raas"
    paper: ClassVar[str] = "RaaS: Reasoning-Aware Attention Sparsity for Efficient LLM Reasoning"

    page_tokens: int = 16
    stamp_ratio: float = 0.5
    keep_prompt: bool = True

    top_k: int | None = 1024
    update_interval: int = 32

    def own_index(self) -> MilestoneConfig:
        return MilestoneConfig(page_tokens=self.page_tokens, stamp_ratio=self.stamp_ratio, keep_prompt=self.keep_prompt)

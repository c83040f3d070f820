"""Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference (Tang et al., 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvrecall.index.units.pages import PageConfig
from kvrecall.methods.base import Method


@dataclass(frozen=True, kw_only=True)
class Quest(Method):
    """Ranks pages by the largest product that the minimum and maximum of their keys allow.

    1. A page of `page_tokens` tokens keeps the minimum and the maximum of its keys, per channel.
    2. Every step scores each page by sum_d max(q_d min_d, q_d max_d) and attends to the best ones, `top_k` tokens in all.
    3. The first two layers stay dense.

    Simplified: the paper keeps every row on the GPU and has no sink or window; here sink and window are resident and pages
    begin after the sink. Its code selects per query head (`gqa="per_head"`); by default a group shares one selection, as in
    papers that compare with Quest, so that the budget holds per KV head. The last page is cut to the budget. Source: the
    paper's text (pages of 16, dense first layers); group-consistent as in LouisKV section 5.1.
    """

    name: ClassVar[str] = "quest"
    paper: ClassVar[str] = "Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference"

    page_tokens: int = 16

    top_k: int | None = 1024
    dense_layers: tuple[int, ...] = (0, 1)

    def own_index(self) -> PageConfig:
        return PageConfig(page_tokens=self.page_tokens, bounds="min-max")

"""ArkVale: Efficient Generative LLM Inference with Recallable Key-Value Eviction (Chen et al., 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvrecall.fetch import Direct
from kvrecall.index.units.pages import PageConfig
from kvrecall.methods.base import Method


@dataclass(frozen=True, kw_only=True)
class ArkVale(Method):
    """Fetches the pages whose bounding volume allows the largest products, and reuses rows from the step before.

    1. A page of `page_tokens` tokens keeps the cuboid centre ± mean absolute deviation of its keys.
    2. Every step scores each page by the largest product with a point of its cuboid and attends to the best ones, `top_k`
       tokens in all. Rows that are still on the device from the step before are not read again.

    Simplified: each KV head chooses its own pages (the code's n_groups = 1 lets all heads share them); pages leave the device
    as soon as they are not selected, not by rank; recalled rows are read in one launch instead of page by page.
    Source: the paper's text and published code (pages of 32, two pages of sink, two of window).
    """

    name: ClassVar[str] = "arkvale"
    paper: ClassVar[str] = "ArkVale: Efficient Generative LLM Inference with Recallable Key-Value Eviction"

    page_tokens: int = 32

    top_k: int | None = 1024
    sink_tokens: int = 64
    local_tokens: int = 64
    update_interval: int = 32

    def own_index(self) -> PageConfig:
        return PageConfig(page_tokens=self.page_tokens, bounds="mean-deviation")

    def own_fetch(self) -> Direct:
        return Direct(reuse=True)

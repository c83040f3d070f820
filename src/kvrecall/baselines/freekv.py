"""FreeKV: Boosting KV Cache Retrieval for Efficient LLM Inference (Liu et al., 2025)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvrecall.fetch import Staged
from kvrecall.index.units.pages import PageConfig
from kvrecall.methods.base import Method
from kvrecall.trigger import Speculative


@dataclass(frozen=True, kw_only=True)
class FreeKV(Method):
    """Attends to the pages that the previous step's query selects, and corrects the KV heads whose query has turned.

    1. A page of `page_tokens` tokens keeps the minimum and the maximum of its keys.
    2. A step uses the selection of the previous query, so the paper fetches it ahead of time.
    3. If the cosine of a KV head's query with the one before, averaged over its group, is below `threshold` (tau), the head
       searches with the current query.
    4. Pages are ranked by the mean over the group of the softmax of their scores, `top_k` tokens in all; rows that are still
       on the device are not read again.

    Simplified: the search runs in the step that uses it (in captured decoding beside that step's projections), so it also sees
    tokens that left the window in between. The first step after a prompt searches with its own query.
    Source: the published code (pages of 32, sink and window 512, 2,048 tokens in all; 0.8 for long
    inputs, 0.9 for long outputs).
    """

    name: ClassVar[str] = "freekv"
    paper: ClassVar[str] = "FreeKV: Boosting KV Cache Retrieval for Efficient LLM Inference"

    page_tokens: int = 32
    threshold: float = 0.8

    top_k: int | None = 1024
    sink_tokens: int = 512
    local_tokens: int = 512
    update_interval: int = 32

    def own_index(self) -> PageConfig:
        return PageConfig(page_tokens=self.page_tokens, bounds="min-max")

    def own_trigger(self) -> Speculative:
        return Speculative(self.threshold)

    def own_fetch(self) -> Staged:
        return Staged(reuse=True)

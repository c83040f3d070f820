"""ShadowKV: KV Cache in Shadows for High-Throughput Long-Context LLM Inference (Sun et al., 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvrecall.baselines.shadowkv.outliers import OutlierPages
from kvrecall.core.errors import ParameterError
from kvrecall.fetch import Direct
from kvrecall.index.pages import PageConfig
from kvrecall.methods.base import Method


@dataclass(frozen=True, kw_only=True)
class ShadowKV(Method):
    """Fetches the chunks with the best landmarks; chunks that their landmark represents badly stay attended.

    1. A chunk of `page_tokens` tokens has its mean key as landmark.
    2. After the prompt the `outlier_pages` chunks with the lowest cosine between a key and its landmark become the static set.
    3. Every step ranks the others by the largest softmax of q · landmark over the group and fetches the best ones; rows that
       are still on the device from the step before are not read again.

    top_k counts the outliers: top_k - outlier_pages * page_tokens tokens are searched for.
    Simplified: keys are fetched like values; the paper rebuilds them on the GPU from a rank-160 SVD of the keys before RoPE. So
    keys are exact here, and twice the bytes move. Generated tokens form chunks of their own when they leave the
    window; the paper's code keeps them dense in a buffer of 128.
    Source: the paper's text and published code (chunks of 8, 48 outliers, 4 local chunks).
    """

    name: ClassVar[str] = "shadowkv"
    paper: ClassVar[str] = "ShadowKV: KV Cache in Shadows for High-Throughput Long-Context LLM Inference"

    page_tokens: int = 8
    outlier_pages: int = 48

    top_k: int | None = 1408
    sink_tokens: int = 0
    local_tokens: int = 32
    update_interval: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        least = self.outlier_pages * self.page_tokens
        if self.top_k is not None and self.top_k <= least:
            raise ParameterError("top_k", f"more than the {least} tokens of outliers", self.top_k, "Lower outlier_pages.")

    def own_index(self) -> PageConfig:
        return PageConfig("max_softmax", self.page_tokens, "mean")

    def own_static(self) -> OutlierPages:
        return OutlierPages(self.outlier_pages, self.page_tokens)

    def own_fetch(self) -> Direct:
        return Direct(reuse=True)

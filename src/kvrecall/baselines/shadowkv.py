"""ShadowKV: KV Cache in Shadows for High-Throughput Long-Context LLM Inference (Sun et al., 2024).

Its static set holds the pages that their landmark represents worst.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvrecall.core.errors import ParameterError
from kvrecall.core.pieces import Work
from kvrecall.fetch import Direct
from kvrecall.index.units.pages import PageConfig
from kvrecall.methods.base import Method
from kvrecall.select.topk import top_k_positions
from kvrecall.static.choice import LOOKED, Observation, StaticChoice


@dataclass(frozen=True)
class OutlierPages(StaticChoice):
    """The whole pages of `page_tokens` tokens with the lowest cosine between any of their keys and their mean key, `pages` of
    them or as many as fit into `top_k`. Chosen once after a prompt; no query takes part.
    """

    name: ClassVar[str] = "outlier-pages"

    pages: int = 48
    page_tokens: int = 8

    def __post_init__(self) -> None:
        self.check_integers("ShadowKV uses 48 pages of 8 tokens.", "pages", "page_tokens")

    @property
    def observed_queries(self) -> int:
        return 0

    def choosing(self, sight: Observation, zone: Tensor, arrivals: Iterable[slice]) -> Work[Tensor]:
        """Ties go to the lower page."""
        for part in arrivals:
            yield LOOKED * (part.stop - part.start)
        size = self.page_tokens
        tokens = min(self.pages * size, sight.top_k) if sight.count is None else sight.count
        worst = top_k_positions(-least_cosines(zone, size), tokens // size)
        ids = worst.unsqueeze(-1) * size + torch.arange(size, device=zone.device)
        return ids.flatten(1).to(torch.int32)


def least_cosines(keys: Tensor, page_tokens: int) -> Tensor:
    """Lowest cosine fp32 `[H_kv, n // page_tokens]` of any key of a whole page with the page's mean; keys: `[H_kv, n, D]`."""
    whole = keys.shape[1] // page_tokens
    pages = keys[:, : whole * page_tokens].double().unflatten(1, (whole, page_tokens))
    return torch.cosine_similarity(pages, pages.mean(2, keepdim=True), dim=-1, eps=1e-12).amin(-1).float()


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

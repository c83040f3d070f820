"""RetroInfer: A Vector-Storage Approach for Scalable Long-Context LLM Inference (Chen et al., 2025)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvrecall.baselines.retroinfer.index import EstimatingConfig
from kvrecall.fetch import Direct
from kvrecall.methods.base import Method


@dataclass(frozen=True, kw_only=True)
class RetroInfer(Method):
    """Attends to the best clusters exactly and to the next best by their means.

    1. Stretches of `stretch_tokens` keys are clustered by spherical k-means on centred keys, `cluster_tokens` in the mean.
    2. Steady zone: sink and window. Retrieval zone: the clusters of the largest share (mean over the group of the softmax of
       q · mean key), `top_k` tokens in all, exact. Rows that are still on the device are not read again.
    3. Estimation zone: the next `estimated_ratio` of all clusters. Each counts as its size times exp(q · mean key), with the
       mean of its values, merged by log-sum-exp.
    4. Generated tokens leave the window `update_interval` at a time, and are clustered together.

    Simplified: the budget is in tokens and may cut the last cluster; its other tokens are neither attended nor estimated (the
    paper takes 1.8 % of the clusters, whole). Rows are kept from one step to the next, not in a cache with LRU replacement.
    Source: the paper's text and published code (clusters of 16, stretches of 8,192, sink 4, window 64, 1.8 % and 23.2 %).
    """

    name: ClassVar[str] = "retroinfer"
    paper: ClassVar[str] = "RetroInfer: A Vector-Storage Approach for Scalable Long-Context LLM Inference"

    cluster_tokens: int = 16
    stretch_tokens: int = 8192
    estimated_ratio: float = 0.232

    top_k: int | None = 1024
    sink_tokens: int = 4
    local_tokens: int = 64
    update_interval: int = 1024

    def own_index(self) -> EstimatingConfig:
        return EstimatingConfig(
            cluster_tokens=self.cluster_tokens, stretch_tokens=self.stretch_tokens, estimated_ratio=self.estimated_ratio
        )

    def own_fetch(self) -> Direct:
        return Direct(reuse=True)

"""LouisKV: Efficient KV Cache Retrieval for Long Input-Output Sequences (Wu et al.), https://arxiv.org/abs/2510.11292."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvrecall.index.units.clusters import ClusterConfig
from kvrecall.methods.base import Method
from kvrecall.trigger import SemanticBoundary


@dataclass(frozen=True, kw_only=True)
class LouisKV(Method):
    """Searches only where the query turns, over clusters of the prompt and segments of generated tokens.

    1. A step searches if the cosine between its query and the one before, averaged over the heads, is below `threshold`
       (tau), per layer and sequence; otherwise the selection stays. `kvrecall trigger-threshold` finds tau for a given stride.
    2. The prompt's keys form k-means clusters of `cluster_tokens` in the mean; generated tokens form segments that end at
       the same turns, or after `max_segment_tokens`. Tokens leave the window by whole segments.
    3. Units are ranked by the mean over the group of the softmax of q · mean key; the budget is filled by token.
    4. The first two layers stay dense.

    threshold: one number, or one per layer. compare: "previous" or "retrieval" (the query of the last search).
    max_stride: most steps without a search. stretch_tokens: prompt tokens that are clustered together.
    size_correction: adds log(tokens) to a unit's logit.
    """

    name: ClassVar[str] = "louiskv"
    paper: ClassVar[str] = "LouisKV: Efficient KV Cache Retrieval for Long Input-Output Sequences"

    threshold: float | tuple[float, ...] = 0.8
    compare: str = "previous"
    max_stride: int | None = None
    cluster_tokens: int = 16
    stretch_tokens: int = 8192
    max_segment_tokens: int = 64
    size_correction: bool = False

    top_k: int | None = 512
    update_interval: int = 64
    dense_layers: tuple[int, ...] = (0, 1)

    def own_index(self) -> ClusterConfig:
        return ClusterConfig(
            cluster_tokens=self.cluster_tokens, stretch_tokens=self.stretch_tokens,
            max_segment_tokens=self.max_segment_tokens, size_correction=self.size_correction,
        )  # fmt: skip

    def own_trigger(self) -> SemanticBoundary:
        return SemanticBoundary(self.threshold, self.compare, self.max_stride)  # type: ignore[arg-type]

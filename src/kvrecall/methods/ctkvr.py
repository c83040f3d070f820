"""CTkvr: KV cache retrieval for long-context LLMs via centroid then token indexing (Lu et al.), https://arxiv.org/abs/2512.15550."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvrecall.core.errors import ParameterError
from kvrecall.index.query_centroids import CentroidConfig
from kvrecall.methods.base import Method


@dataclass(frozen=True, kw_only=True)
class CTKVR(Method):
    """Finds the most similar earlier queries and reranks the keys that they attended to.

    1. At the end of the prompt its last C = min(`max_centroids`, n / `tokens_per_centroid`) queries become centroids; each
       lists the rho = `list_ratio` x `top_k` keys of the largest softmax score, largest over the group. `causal`: of the keys
       up to its own position; Algorithm 1 has no mask.
    2. A step recalls the lists of the C' = `recalled_centroids` most similar centroids (cosine, largest over the group),
       removes duplicates, and reranks the keys exactly to `top_k` (rho').
    3. The rerank, and the attention to the selected rows, run on the CPU, while the device attends to sink and window.
    4. With `dynamic_update` the query then replaces the oldest centroid.

    The `pool_tokens` newest tokens of the retrieval zone are always recalled; older ones enter lists that rank them high
    enough.
    """

    name: ClassVar[str] = "ctkvr"
    paper: ClassVar[str] = "CTkvr: KV Cache Retrieval for Long-Context LLMs via Centroid then Token Indexing"

    max_centroids: int = 2048
    tokens_per_centroid: int = 16
    list_ratio: float = 2.5
    causal: bool = True
    recalled_centroids: int = 4
    dynamic_update: bool = True
    pool_tokens: int = 512

    top_k: int | None = 512

    own_attend: ClassVar[str] = "host"

    def __post_init__(self) -> None:
        if self.list_ratio < 1:
            raise ParameterError("list_ratio", "a number >= 1", self.list_ratio, "A list should hold at least top_k keys.")
        super().__post_init__()

    def own_index(self) -> CentroidConfig:
        return CentroidConfig(
            max_centroids=self.max_centroids, tokens_per_centroid=self.tokens_per_centroid,
            list_tokens=int(self.list_ratio * (self.top_k or 1)), causal=self.causal,
            recalled_centroids=self.recalled_centroids, dynamic_update=self.dynamic_update, pool_tokens=self.pool_tokens,
        )  # fmt: skip

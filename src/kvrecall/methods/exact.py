"""Exact: true top-k by inner product, the ground truth of retrieval."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvrecall.errors import ParameterError
from kvrecall.index.base import LayerShape
from kvrecall.index.exact import ExactIndex
from kvrecall.methods.base import Method
from kvrecall.select.gqa import check_mode


@dataclass(frozen=True, kw_only=True)
class Exact(Method):
    """Scores every key, fetches the best `top_k`. Keeps a copy of the keys on the device: a yardstick, not a saving.

    gqa: "mean_softmax" (the best single search per KV head), "mean_q", "max" or "per_head".
    """

    name: ClassVar[str] = "exact"
    paper: ClassVar[str] = "exact top-k (ground truth)"

    gqa: str = "mean_softmax"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_mode(self.gqa)
        if self.top_k is None:
            raise ParameterError("top_k", "an integer > 0", None, "Use kvrecall.Full() to attend to everything.")

    def build_index(self, shape: LayerShape) -> ExactIndex:
        return ExactIndex(shape, self.gqa)

    def summary_bytes(self, head_dim: int, dtype: torch.dtype) -> float:
        return ExactIndex.nbytes_per_token(head_dim, dtype)

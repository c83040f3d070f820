"""Exact: true top-k by inner product, the ground truth of retrieval."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvrecall.index.exact import ExactConfig
from kvrecall.methods.base import Method


@dataclass(frozen=True, kw_only=True)
class Exact(Method):
    """Scores every key, fetches the best `top_k`. Keeps a copy of the keys on the device; for comparison.

    Its own gqa is "mean_softmax", the best single search per KV head.
    """

    name: ClassVar[str] = "exact"
    paper: ClassVar[str] = "exact top-k (ground truth)"

    def own_index(self) -> ExactConfig:
        return ExactConfig()

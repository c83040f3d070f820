"""What the other methods are compared with: dense attention over everything through the same cache, and true top-k."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvrecall.core.errors import ParameterError
from kvrecall.index.exact import ExactConfig
from kvrecall.methods.base import Method


@dataclass(frozen=True, kw_only=True)
class Full(Method):
    """No index, no search: every step reads the whole retrieval zone, on a GPU while it fits (docs/methods/full.md)."""

    name: ClassVar[str] = "full"
    paper: ClassVar[str] = "full attention"

    top_k: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.top_k is not None:
            raise ParameterError("top_k", "None", self.top_k, "Full attends to everything; use kvrecall.Exact(top_k=...).")


@dataclass(frozen=True, kw_only=True)
class Exact(Method):
    """Scores every key, fetches the best `top_k`. Keeps a copy of the keys on the device; for comparison.

    Its own gqa is "mean_softmax", the best single search per KV head.
    """

    name: ClassVar[str] = "exact"
    paper: ClassVar[str] = "exact top-k (ground truth)"

    def own_index(self) -> ExactConfig:
        return ExactConfig()

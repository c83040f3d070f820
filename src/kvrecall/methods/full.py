"""Full: dense attention over everything through the same cache, the reference for answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvrecall.core.errors import ParameterError
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

"""The result of a request."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvrecall.backends.transformers import RetrievalCache


@dataclass(frozen=True)
class GenerateResult:
    """sequences: prompt and answer, `[B, T]`. new_tokens: the answer's ids per sequence, without padding after the end. cache:
    the given one, or the one made for the given method."""

    sequences: Tensor
    new_tokens: list[list[int]]
    texts: list[str] | None
    prefill_seconds: float
    decode_seconds: float
    cache: RetrievalCache

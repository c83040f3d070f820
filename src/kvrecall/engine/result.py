"""What a request gives back."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvrecall.backends.transformers import RetrievalCache


@dataclass(frozen=True)
class GenerateResult:
    """sequences: prompt and answer, `[B, T]`. new_tokens: the answer's ids per sequence, without padding after the end. cache:
    the one that was given, or was made for the method that was given."""

    sequences: Tensor
    new_tokens: list[list[int]]
    texts: list[str] | None
    prefill_seconds: float
    decode_seconds: float
    cache: RetrievalCache

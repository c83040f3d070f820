"""StreamingLLM: Efficient Streaming Language Models with Attention Sinks (Xiao et al., 2023)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvrecall.core.errors import ParameterError
from kvrecall.index.exact import NothingConfig
from kvrecall.methods.base import Method


@dataclass(frozen=True, kw_only=True)
class Streaming(Method):
    """Attends to the first and the last tokens only.

    1. The first `sink_tokens` stay attended, because softmax mass without a target falls on them.
    2. Of the others the last `local_tokens` stay attended.

    Simplified: the rows stay on the host instead of being evicted; positions are those of the text; the paper numbers the
    remaining tokens anew, which matters only beyond the model's context. The window shrinks in steps and has local_tokens to
    local_tokens + update_interval - 1 tokens.
    top_k is 0: nothing is retrieved. Source: the paper (4 sinks); its window is what the model was trained with.
    """

    name: ClassVar[str] = "streaming"
    paper: ClassVar[str] = "Efficient Streaming Language Models with Attention Sinks"
    least_top_k: ClassVar[int] = 0

    top_k: int | None = 0
    sink_tokens: int = 4
    local_tokens: int = 1020
    update_interval: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.top_k != 0:
            raise ParameterError("top_k", "0", self.top_k, "Streaming retrieves nothing; its budget is sink + local_tokens.")

    def own_index(self) -> NothingConfig:
        return NothingConfig()

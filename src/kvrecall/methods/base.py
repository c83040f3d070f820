"""What a method is: a frozen dataclass of hyper-parameters that names the parts it uses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch

from kvrecall.cache.zones import ZoneSizes
from kvrecall.errors import ParameterError
from kvrecall.index.base import Index, LayerShape
from kvrecall.trigger import EveryStep, Trigger

HEAD_DIMS = (64, 80, 96, 128, 192, 256)
"""Head sizes that every method supports and is tested with."""


@dataclass(frozen=True, kw_only=True)
class Method(ABC):
    """Hyper-parameters that all methods share. Budgets are tokens per KV head.

    top_k: retrieved tokens per step; None attends to everything.
    sink_tokens, local_tokens, update_interval: zone sizes in tokens (see `kvrecall.cache.zones`).
    full_attention_threshold: sequences shorter than max(this, sink + local + 2 top_k) tokens are attended whole.
    dense_layers: layers that always attend to everything and keep no index.
    """

    name: ClassVar[str]
    paper: ClassVar[str] = ""

    top_k: int | None = 100
    sink_tokens: int = 64
    local_tokens: int = 256
    update_interval: int = 512
    full_attention_threshold: int = 2000
    dense_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self.zone_sizes()
        if self.top_k is not None and (not isinstance(self.top_k, int) or self.top_k <= 0):
            raise ParameterError("top_k", "an integer > 0", self.top_k, "It is the number of tokens fetched per KV head.")
        if not isinstance(self.full_attention_threshold, int) or self.full_attention_threshold < 0:
            raise ParameterError(
                "full_attention_threshold", "an integer >= 0", self.full_attention_threshold, "Use 0 to retrieve at any length."
            )

    def zone_sizes(self) -> ZoneSizes:
        """The zones' capacities; raises ParameterError for impossible ones."""
        return ZoneSizes(self.sink_tokens, self.local_tokens, self.update_interval)

    def full_attention_below(self) -> int:
        """Length in tokens under which a sequence is attended whole."""
        return max(self.full_attention_threshold, self.sink_tokens + self.local_tokens + 2 * (self.top_k or 0))

    @abstractmethod
    def build_index(self, shape: LayerShape) -> Index | None:
        """An empty index for one layer, or None for a method that never searches."""

    def build_trigger(self) -> Trigger:
        """The trigger of one layer."""
        return EveryStep()

    @abstractmethod
    def summary_bytes(self, head_dim: int, dtype: torch.dtype) -> float:
        """Device bytes of the summaries per token and KV head, for a cache of the given dtype."""

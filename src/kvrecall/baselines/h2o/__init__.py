"""H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models (Zhang et al., 2023)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvrecall.baselines.h2o.index import AccumulatedConfig
from kvrecall.methods.base import Method


@dataclass(frozen=True, kw_only=True)
class H2O(Method):
    """Keeps the tokens that have received most attention so far, and the recent ones; dropped tokens never return.

    1. Every query, of the prompt and of every step, adds its attention to the sums of the tokens that it attends to.
    2. Of the tokens that left the window, the `top_k` with the largest sums stay attended; the others are dropped.
    3. The budget is split evenly between heavy hitters (top_k) and recent tokens (local_tokens).

    Simplified: dropped rows stay on the host; the heads of a group add up their sums (`gqa="per_head"` drops per query head
    like the paper, which has no groups); tokens of the prompt are dropped at its end; the window shrinks in steps of
    update_interval. A cache that is forked to H2O knows only the queries that it was told to observe.
    Source: the paper's text (half heavy hitters, half recent tokens).
    """

    name: ClassVar[str] = "h2o"
    paper: ClassVar[str] = "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models"

    top_k: int | None = 512
    sink_tokens: int = 0
    local_tokens: int = 512
    update_interval: int = 32

    def own_index(self) -> AccumulatedConfig:
        return AccumulatedConfig()

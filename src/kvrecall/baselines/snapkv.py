"""SnapKV: LLM Knows What You Are Looking For Before Generation (Li et al., 2024), and its periodically updated form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvrecall.core.errors import ParameterError
from kvrecall.index.exact import NothingConfig
from kvrecall.methods.base import Method
from kvrecall.static.choice import ObservationWindow


@dataclass(frozen=True, kw_only=True)
class SnapKV(Method):
    """The last queries of the prompt choose once which of its tokens stay attended; the others are not attended again.

    1. The last `window_tokens` queries of the prompt judge its keys: causal softmax, mean over the window, then the mean over
       `pool_radius` neighbours on each side, so that whole phrases survive.
    2. The best `top_k` tokens stay attended, with the window itself (local_tokens) and everything generated since.

    refresh_interval: decode steps after which the last queries choose anew; None: never (the paper).
    Simplified: the rows stay on the host instead of being evicted; scores are averaged over a group, so that its heads share
    one set (the paper's code keeps one per query head); generated tokens stay attended until update_interval of them have
    come, and then count as not chosen. If the zone fits into the budget at first, the set is chosen when it no longer does.
    Source: the paper's text and its published code (window 64, mean over 5).
    """

    name: ClassVar[str] = "snapkv"
    paper: ClassVar[str] = "SnapKV: LLM Knows What You Are Looking For Before Generation"

    window_tokens: int = 64
    pool_radius: int = 2
    refresh_interval: int | None = None

    top_k: int | None = 1024
    sink_tokens: int = 0
    local_tokens: int = 64
    update_interval: int = 2048

    def own_index(self) -> NothingConfig:
        return NothingConfig()

    def own_static(self) -> ObservationWindow:
        return ObservationWindow(
            1.0, self.window_tokens, self.refresh_interval, page_tokens=1, pool_radius=self.pool_radius, lead_tokens=0,
            softmax="all",
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SnapKVPlus(SnapKV):
    """SnapKV whose set is chosen anew from all tokens every `refresh_interval` steps, by the last `window_tokens` queries.

    Tokens that were not chosen before may come back, because their rows are still on the host. Generated tokens are judged too.
    window_tokens, pool_radius: as SnapKV. Simplified: as SnapKV. Source: SnapKV's rule with the refresh of PRKV's Algorithm 1;
    it has no paper; the default interval is PRKV's.
    """

    name: ClassVar[str] = "snapkv+"
    paper: ClassVar[str] = "SnapKV: LLM Knows What You Are Looking For Before Generation (periodically updated)"

    refresh_interval: int | None = 128
    update_interval: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.refresh_interval is None:
            raise ParameterError("refresh_interval", "an integer >= 1", None, "Use SnapKV to choose once.")

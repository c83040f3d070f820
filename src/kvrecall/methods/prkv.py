"""PRKV: Page Restricted KV Cache for High Accuracy and Efficiency LLM Generation (anonymous), https://openreview.net/forum?id=7FM0GBFhe5."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvrecall.core.errors import ParameterError
from kvrecall.fetch import Staged
from kvrecall.index.units.pages import PageConfig
from kvrecall.methods.base import Method
from kvrecall.static.choice import ObservationWindow, check_lead


@dataclass(frozen=True, kw_only=True)
class PRKV(Method):
    """A static set of single tokens beside dynamic pages.

    1. At the end of the prompt and every `refresh_interval` (T) steps, the last `window_tokens` queries judge all keys:
       softmax per query head over the keys before these queries, mean over window and group. The best `static_ratio` (S) of
       the budget become the static set. Judging starts soon after tokens have left the window, `refresh_lead_tokens` steps
       before the set is due, and these steps share the work (0: at once, as in the paper; None: 8, or the steps between two
       refreshes if fewer). 2. The other tokens form pages of `page_tokens`, represented by bounding volumes. 3. Every step
       ranks the pages by the largest product that their volume allows (mean over the group of softmaxed scores) and fetches
       pages for the other 1 - S of the budget, in one staged bulk copy.

    static_ratio: a share in [0, 1], or "online" to measure it at the end of the prompt (Appendix G). bounds: "mean-deviation"
    or "min-max". The paper has no sink; its local window has 64 tokens.
    """

    name: ClassVar[str] = "prkv"
    paper: ClassVar[str] = "PRKV: Page Restricted KV Cache for High Accuracy and Efficiency LLM Generation"

    page_tokens: int = 32
    bounds: str = "mean-deviation"
    static_ratio: float | str = 0.25
    window_tokens: int = 64
    refresh_interval: int = 128
    refresh_lead_tokens: int | None = None

    top_k: int | None = 1024
    sink_tokens: int = 0
    local_tokens: int = 64
    update_interval: int = 128

    def __post_init__(self) -> None:
        check_lead("refresh_lead_tokens", self.refresh_lead_tokens, self.refresh_interval)  # by the field's name here
        super().__post_init__()
        if self.top_k is not None and self.top_k < self.page_tokens:
            raise ParameterError(
                "top_k", f"at least one page of {self.page_tokens} tokens", self.top_k, "Raise top_k or lower page_tokens."
            )

    def own_index(self) -> PageConfig:
        return PageConfig(page_tokens=self.page_tokens, bounds=self.bounds)  # type: ignore[arg-type]

    def own_static(self) -> ObservationWindow:
        return ObservationWindow(
            self.static_ratio, self.window_tokens, self.refresh_interval, self.page_tokens, lead_tokens=self.refresh_lead_tokens
        )

    def own_fetch(self) -> Staged:
        return Staged()

"""The static set of ShadowKV: the pages that their landmark represents worst."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvrecall.core.errors import ParameterError
from kvrecall.core.pieces import Work
from kvrecall.select.topk import top_k_positions
from kvrecall.static.choice import LOOKED, Observation, StaticChoice


@dataclass(frozen=True)
class OutlierPages(StaticChoice):
    """The whole pages of `page_tokens` tokens with the lowest cosine between any of their keys and their mean key, `pages` of
    them or as many as fit into `top_k`. Chosen once after a prompt; no query takes part.
    """

    name: ClassVar[str] = "outlier-pages"

    pages: int = 48
    page_tokens: int = 8

    def __post_init__(self) -> None:
        for name in ("pages", "page_tokens"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ParameterError(name, "an integer >= 1", value, "ShadowKV uses 48 pages of 8 tokens.")

    @property
    def observed_queries(self) -> int:
        return 0

    def choosing(self, sight: Observation, zone: Tensor, arrivals: Iterable[slice]) -> Work[Tensor]:
        """Ties go to the lower page."""
        for part in arrivals:
            yield LOOKED * (part.stop - part.start)
        size = self.page_tokens
        tokens = min(self.pages * size, sight.top_k) if sight.count is None else sight.count
        worst = top_k_positions(-least_cosines(zone, size), tokens // size)
        ids = worst.unsqueeze(-1) * size + torch.arange(size, device=zone.device)
        return ids.flatten(1).to(torch.int32)


def least_cosines(keys: Tensor, page_tokens: int) -> Tensor:
    """Lowest cosine fp32 `[H_kv, n // page_tokens]` of any key of a whole page with the page's mean; keys: `[H_kv, n, D]`."""
    whole = keys.shape[1] // page_tokens
    pages = keys[:, : whole * page_tokens].double().unflatten(1, (whole, page_tokens))
    return torch.cosine_similarity(pages, pages.mean(2, keepdim=True), dim=-1, eps=1e-12).amin(-1).float()

"""What represents a page of tokens: a bounding volume of its keys, or their mean (`pages`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvrecall.index.units import inner_products
from kvrecall.index.units.plan import UnitKind


@dataclass(frozen=True)
class PageKind:
    """Tokens per page, its bounds (`pages.PageConfig`), and how a group of query heads shares a search."""

    tokens: int
    bounds: str
    gqa: str

    @property
    def points(self) -> int:
        """How many key-sized vectors represent a page."""
        return 1 if self.bounds == "mean" else 2

    @property
    def units(self) -> UnitKind:
        """Properties of the pages for kernels."""
        return UnitKind(volume=self.points > 1, ordered=True, least_tokens=self.tokens)


def volumes(keys: Tensor, page_tokens: int, bounds: str) -> Tensor:
    """Bounding volumes `[H_kv, ceil(n / page_tokens), 2 D]`, hi | lo, or landmarks `[..., D]`, of keys `[H_kv, n, D]`, in the
    keys' dtype."""
    heads, count, dim = keys.shape
    whole = count // page_tokens
    parts = [keys[:, : whole * page_tokens].reshape(heads, whole, page_tokens, dim)]
    if count % page_tokens:
        parts.append(keys[:, whole * page_tokens :].unsqueeze(1))
    pages = [_volume(part.float(), bounds) for part in parts]
    return torch.cat(pages, 1).to(keys.dtype)


def _volume(pages: Tensor, bounds: str) -> Tensor:
    if bounds == "min-max":
        return torch.cat([pages.amax(2), pages.amin(2)], -1)
    centre = pages.mean(2)
    if bounds == "mean":
        return centre
    spread = (pages - centre.unsqueeze(2)).abs_().mean(2)
    return torch.cat([centre + spread, centre - spread], -1)


def page_scores(queries: Tensor, reps: Tensor, kind: PageKind) -> Tensor:
    """Scores fp32 `[H_kv, G', U]` of queries fp32 `[H_kv, G', D]` with the pages' representations."""
    return inner_products(queries, reps) if kind.points == 1 else volume_scores(queries, reps)


def volume_scores(queries: Tensor, reps: Tensor) -> Tensor:
    """sum_d max(q_d lo_d, q_d hi_d) as one product: positive coordinates are multiplied by hi, negative ones by lo.

    queries: fp32 `[H_kv, G', D]`; reps: `[H_kv, U, 2 D]` -> fp32 `[H_kv, G', U]`.
    """
    return inner_products(torch.cat([queries.clamp_min(0), queries.clamp_max(0)], -1), reps)

"""Twilight's rule: of the tokens that a search found, the fewest that hold a share p of their attention."""

from __future__ import annotations

import torch
from torch import Tensor

from kvrecall.select.topk import union_rows


def top_p_positions(shares: Tensor, p: float) -> Tensor:
    """bool `[..., n]`: the fewest of fp64 shares `[..., n]`, largest first, that add up to p of their sum; at least one.

    Equal shares: the lower position first. p = 1 keeps everything, independent of rounding.
    """
    if p >= 1:
        return torch.ones_like(shares, dtype=torch.bool)
    ordered, order = torch.sort(shares, dim=-1, descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered
    return torch.zeros_like(shares, dtype=torch.bool).scatter(-1, order, before < p * ordered.sum(-1, keepdim=True))


def group_shares(logits: Tensor, mode: str) -> Tensor:
    """Shares fp64 `[..., S, n]` to prune by: those of each head for `per_head` (S = G), else of the group (S = 1).

    logits: fp64 `[..., G', n]`, -inf for padding. `max` and `max_softmax` take the largest share of any head.
    """
    shares = logits.softmax(-1).nan_to_num(0.0)  # rows with padding only
    if mode == "per_head":
        return shares
    return shares.amax(-2, keepdim=True) if mode.startswith("max") else shares.mean(-2, keepdim=True)


def prune(ids: Tensor, logits: Tensor, mode: str, p: float) -> tuple[Tensor, Tensor]:
    """Prunes ids int32 `[H_kv, K]` (-1: none) with logits fp64 `[H_kv, G', K]`; returns ids and counts."""
    padding = (ids < 0).unsqueeze(1)
    kept = top_p_positions(group_shares(logits.masked_fill(padding, float("-inf")), mode), p)
    return union_rows(torch.where(kept & ~padding, ids.unsqueeze(1), -1))

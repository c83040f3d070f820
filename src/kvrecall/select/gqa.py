"""How the query heads of one KV head share a search.

`mean_q`       search once with the mean of the group's queries (the paper's code; equals the mean of the raw logits).
`mean_softmax` score with every head, rank by the mean over heads of softmax(scaling * score).
`max`          score with every head, rank by the largest score.
`max_softmax`  score with every head, rank by the largest softmax(scaling * score) (CTkvr, Algorithm 2).
`per_head`     search with every head, fetch the union.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from kvrecall.core.errors import UnknownNameError

GQAMode = Literal["mean_q", "mean_softmax", "max", "max_softmax", "per_head"]
GQA_MODES: tuple[str, ...] = get_args(GQAMode)


def check_mode(mode: str) -> None:
    """Raises UnknownNameError for a mode that does not exist."""
    if mode not in GQA_MODES:
        raise UnknownNameError("gqa mode", mode, GQA_MODES)


def search_queries(queries: Tensor, kv_heads: int, mode: str) -> Tensor:
    """fp32 queries to search with, `[B, H_q, D]` -> `[B, H_kv, 1 or G, D]` (1 for `mean_q`)."""
    grouped = queries.float().unflatten(1, (kv_heads, -1))
    return grouped.mean(2, keepdim=True) if mode == "mean_q" else grouped


def reduce_scores(scores: Tensor, mode: str, scaling: float) -> Tensor:
    """Ranking scores of a group, fp32 `[..., G, C]` -> `[..., C]`, or `[..., G, C]` unchanged for `per_head`.

    The softmax runs over the C given keys in float64, so that two implementations round to the same fp32 ranking. A key that
    all heads score with -inf ranks -inf: a share of 0 could be found.
    """
    if mode == "per_head":
        return scores
    if mode in ("mean_softmax", "max_softmax") and scores.shape[-1]:
        logits = scores.double() * scaling
        peak = logits.amax(-1, keepdim=True)
        shifted = logits - torch.where(peak.isfinite(), peak, 0.0)
        weights = torch.exp(shifted)
        total = weights.sum(-1, keepdim=True).clamp_min(1e-300)
        if mode == "mean_softmax":
            return (weights / total).mean(-2).float().masked_fill(scores.isneginf().all(-2), float("-inf"))
        return (shifted - torch.log(total)).amax(-2).float()  # its logarithm: small shares must not underflow to ties
    return scores.amax(-2)


def ranking(scores: Tensor, mode: str, scaling: float) -> Tensor:
    """As `reduce_scores`, by searches: fp32 `[..., G, C]` -> `[..., S, C]` with S = G searches for `per_head`, else one."""
    reduced = reduce_scores(scores, mode, scaling)
    return reduced if mode == "per_head" else reduced.unsqueeze(-2)

"""Deterministic top-k: the larger score wins, among equals the lower position; results come in ascending position."""

from __future__ import annotations

import torch
from torch import Tensor


def top_k_positions(scores: Tensor, k: int) -> Tensor:
    """int64 positions `[..., min(k, n)]`, ascending, of the k largest of scores `[..., n]`."""
    order = torch.sort(scores, dim=-1, descending=True, stable=True).indices
    return order[..., : min(k, scores.shape[-1])].sort(dim=-1).values


def union_rows(ids: Tensor, cut: bool = True) -> tuple[Tensor, Tensor]:
    """Union over the next-to-last dimension: int `[..., G, K]` (-1 = none) -> ascending int32 `[..., G K]` padded, counts.

    cut: the padded width is cut to the longest union, for which the host waits if the ids are on a GPU.
    """
    flat = ids.flatten(-2)
    last = torch.iinfo(flat.dtype).max
    ordered = torch.where(flat < 0, last, flat).sort(dim=-1).values
    first = torch.ones_like(ordered, dtype=torch.bool)
    first[..., 1:] = ordered[..., 1:] != ordered[..., :-1]
    unique = torch.where(first, ordered, last).sort(dim=-1).values
    counts = (unique != last).sum(-1)
    if cut:
        unique = unique[..., : int(counts.max()) if counts.numel() else 0]
    return torch.where(unique == last, -1, unique).to(torch.int32), counts.to(torch.int32)

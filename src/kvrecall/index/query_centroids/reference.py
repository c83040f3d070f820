"""Recall and rerank of CTkvr (Algorithm 2 b, c) in plain torch: the reference of the other paths."""

from __future__ import annotations

import torch
from torch import Tensor

from kvrecall.index.base import RowSource


def distinct(lists: Tensor, tokens: int, first_always: int, excluded: Tensor | None) -> tuple[Tensor, Tensor]:
    """See `cpu.distinct`; as many columns as there can be ids, because the host does not wait for a GPU."""
    heads, device = lists.shape[0], lists.device
    most = min(tokens, lists[0].numel() + tokens - first_always)
    wanted = torch.zeros(heads, tokens + 1, dtype=torch.bool, device=device)
    flat = lists.flatten(1).long()
    wanted.scatter_(1, torch.where(flat < 0, tokens, flat), True)
    wanted[:, first_always:] = True
    if excluded is not None:
        wanted.scatter_(1, excluded.long(), False)
    wanted[:, tokens] = False
    place = wanted.cumsum(1, dtype=torch.int32)
    counts = place[:, -1].contiguous()
    ids = torch.full((heads, most + 1), -1, dtype=torch.int32, device=device)
    every = torch.arange(tokens + 1, dtype=torch.int32, device=device).expand(heads, -1)
    ids.scatter_(1, torch.where(wanted, place - 1, most).long(), every)  # unwanted ids all go to an extra column
    return ids[:, :most].contiguous(), counts


def score_rows(queries: Tensor, source: RowSource, ids: Tensor) -> Tensor:
    """Exact inner products fp32 `[H_kv, G, R]` on the queries' device; the keys of `ids` are copied there."""
    keys = source.gather(ids.cpu().clamp_min(0))[:, :, 0].to(queries.device)
    return queries @ keys.float().transpose(-1, -2)

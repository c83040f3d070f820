"""Recall and rerank of CTkvr (Algorithm 2 b, c) in plain torch: the reference of the other paths."""

from __future__ import annotations

import torch
from torch import Tensor

from kvrecall.index.base import RowSource


def distinct(lists: Tensor, tokens: int, first_always: int, barred: Tensor | None) -> tuple[Tensor, Tensor]:
    """See `cpu.distinct`."""
    heads = lists.shape[0]
    wanted = torch.zeros(heads, tokens + 1, dtype=torch.bool, device=lists.device)
    flat = lists.flatten(1).long()
    wanted.scatter_(1, torch.where(flat < 0, tokens, flat), True)
    wanted[:, first_always:] = True
    if barred is not None:
        wanted.scatter_(1, barred.long(), False)
    wanted = wanted[:, :tokens]
    counts = wanted.sum(1)
    order = torch.sort(wanted.int(), dim=1, descending=True, stable=True).indices[:, : int(counts.max()) if heads else 0]
    real = torch.arange(order.shape[1], device=order.device) < counts.unsqueeze(1)
    return torch.where(real, order, -1).to(torch.int32), counts.to(torch.int32)


def score_rows(queries: Tensor, source: RowSource, ids: Tensor) -> Tensor:
    """Exact inner products fp32 `[H_kv, G, R]` on the queries' device; the keys of `ids` are copied there."""
    keys = source.gather(ids.cpu().clamp_min(0))[:, :, 0].to(queries.device)
    return queries @ keys.float().transpose(-1, -2)

"""Attention in float64, written once more and as plainly as possible."""

from __future__ import annotations

import torch
from torch import Tensor


def dense(
    queries: Tensor, keys: Tensor, values: Tensor, scaling: float, softcap: float = 0.0, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """queries `[H_q, T, D]`, keys and values `[H_kv, n, D]` -> float64 out `[H_q, T, D]`, lse `[H_q, T]`.

    causal: query t sees the first n - T + t + 1 rows.
    """
    group = queries.shape[0] // keys.shape[0]
    out, lse = torch.zeros(queries.shape, dtype=torch.float64), torch.zeros(queries.shape[:2], dtype=torch.float64)
    for head in range(queries.shape[0]):
        logits = queries[head].double() @ keys[head // group].double().T * scaling
        if softcap:
            logits = softcap * torch.tanh(logits / softcap)
        if causal:
            count, rows = logits.shape
            logits = logits.masked_fill(torch.arange(rows) > torch.arange(rows - count, rows).unsqueeze(1), float("-inf"))
        lse[head] = torch.logsumexp(logits, -1)
        out[head] = torch.exp(logits - lse[head].unsqueeze(-1)) @ values[head // group].double() if keys.shape[1] else 0
    return out, lse

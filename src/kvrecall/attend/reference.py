"""Attention over a set of rows in fp32 torch: the reference, and the path of devices without kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from kvrecall.core.structs import HostTable, Partial, Rows


def attend_rows(queries: Tensor, rows: Rows, scaling: float, softcap: float = 0.0) -> Partial:
    """Each query attends to the valid rows of its KV head.

    queries: `[B, H_q, T_q, D]`, any float dtype. softcap: 0 for none, else logits become softcap * tanh(logits / softcap).
    The rows' bias, if any, is added after that.
    """
    kv = rows.kv.float()
    b, kv_heads, count = kv.shape[:3]
    grouped = queries.float().unflatten(1, (kv_heads, -1))  # [B, H_kv, G, T_q, D]
    logits = torch.einsum("bhgtd,bhnd->bhgtn", grouped, kv[:, :, :, 0]) * scaling
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    if rows.bias is not None:
        logits = logits + rows.bias.unflatten(1, (kv_heads, -1)).unsqueeze(3)
    real = torch.arange(count, device=kv.device) < rows.lengths.to(kv.device).unsqueeze(-1)  # [B, H_kv, N]
    real = real.view(b, kv_heads, 1, 1, count)
    return softmax_rows(
        logits.masked_fill(~real, float("-inf")), kv[:, :, :, 1].masked_fill(~real.view(b, kv_heads, count, 1), 0.0)
    )


def attend_zones(
    queries: Tensor, table: HostTable, lengths: Tensor, longest: int, scaling: float, softcap: float = 0.0
) -> Partial:
    """Each sequence attends to the first lengths[b] tokens of its blocks. queries: `[B, H_q, 1, D]`; table: of the B sequences,
    on the queries' device; lengths: int32 `[B]`, none above `longest`, which is at least 1."""
    tokens = torch.arange(longest, device=queries.device)
    blocks = table.blocks.long()[:, tokens // table.block_size]  # [B, longest]
    kv = table.rows[blocks, :, tokens % table.block_size].transpose(1, 2)  # [B, H_kv, longest, 2, D]
    return attend_rows(queries, Rows(kv, lengths.unsqueeze(1).expand(-1, kv.shape[1])), scaling, softcap)


def softmax_rows(logits: Tensor, values: Tensor) -> Partial:
    """Softmax of logits `[B, H_kv, G, T_q, N]` (-inf = not attended) over values `[B, H_kv, N, D]`."""
    peak = logits.amax(-1, keepdim=True) if logits.shape[-1] else logits.new_full((*logits.shape[:-1], 1), float("-inf"))
    weights = torch.exp(logits - torch.where(peak.isfinite(), peak, 0.0))
    total = weights.sum(-1, keepdim=True)
    out = torch.einsum("bhgtn,bhnd->bhgtd", weights / torch.where(total > 0, total, 1.0), values)
    lse = (peak + torch.log(total)).squeeze(-1)
    return Partial(out.flatten(1, 2), lse.flatten(1, 2))

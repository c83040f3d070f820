"""Attention of many queries: cuDNN's or torch's flash kernels, which return the log-sum-exp; otherwise fp32 torch.

KV heads are not copied: cuDNN supports groups, and for flash the query heads of a group are folded into the query dimension.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvrecall.attend import cudnn
from kvrecall.attend.reference import softmax_rows
from kvrecall.core.errors import ShapeError
from kvrecall.core.structs import Partial

_MATH_QUERIES = 256
"""Queries at a time on the fp32 path: bounds its logits to H_q * 256 * N * 4 bytes."""


def attend_block(queries: Tensor, block: Tensor, scaling: float, softcap: float = 0.0, among: int = 0) -> Partial:
    """All queries attend to all rows. queries: `[H_q, T_q, D]`; block: `[H_kv, n, 2, D]` on the same device. among: how many
    rows they, or later queries of the same prompt, attend to in all blocks together, if known.

    Returns a Partial with batch 1: out `[1, H_q, T_q, D]`.
    """
    heads, count, dim = queries.shape
    kv_heads = block.shape[0]
    _check_heads(heads, kv_heads)
    if not block.shape[1] or not count:
        return Partial.empty_like(queries.unsqueeze(0))
    if softcap or not _has_flash(queries):
        return _math(queries, block[:, :, 0], block[:, :, 1], scaling, softcap, causal=False)
    keys, values = block[None, :, :, 0], block[None, :, :, 1]
    if cudnn.is_better(queries, block.shape[1], among):
        return cudnn.attend(queries.unsqueeze(0), keys, values, scaling, causal=False)
    folded = queries.reshape(1, kv_heads, heads // kv_heads * count, dim)
    out, lse = _flash(folded, keys, values, scaling, causal=False)
    return Partial(out.float().reshape(1, heads, count, dim), lse.float().reshape(1, heads, count))


def attend_causal(
    queries: Tensor, keys: Tensor, values: Tensor, scaling: float, softcap: float = 0.0, among: int = 0
) -> Partial:
    """Query t attends to rows 0..t of its own chunk. queries: `[H_q, T, D]`; keys, values: `[H_kv, T, D]`; among: as above.

    Raises ShapeError for other shapes, because torch's CPU kernel divides by the number of keys and would end the process.
    """
    _check_heads(queries.shape[0], keys.shape[0])
    if keys.shape[1] != queries.shape[1] or values.shape != keys.shape:
        got = f"{keys.shape[1]} keys and {values.shape[1]} values"
        raise ShapeError("keys", f"one key and value for each of {queries.shape[1]} queries", got, "Give a whole chunk.")
    if not queries.shape[1]:
        return Partial.empty_like(queries.unsqueeze(0))
    if softcap or not _has_flash(queries):
        return _math(queries, keys, values, scaling, softcap, causal=True)
    if cudnn.is_better(queries, keys.shape[1], among):
        return cudnn.attend(queries.unsqueeze(0), keys.unsqueeze(0), values.unsqueeze(0), scaling, causal=True)
    group = queries.shape[0] // keys.shape[0]
    keys, values = (x.repeat_interleave(group, 0).unsqueeze(0) for x in (keys, values))
    out, lse = _flash(queries.unsqueeze(0), keys, values, scaling, causal=True)
    return Partial(out.float(), lse.float())


def _check_heads(heads: int, kv_heads: int) -> None:
    if not kv_heads or heads % kv_heads:
        raise ShapeError("queries", f"a multiple of {kv_heads} heads", heads, "Every KV head serves as many query heads.")


def _has_flash(queries: Tensor) -> bool:
    if queries.device.type == "cpu":
        return queries.dtype in (torch.float32, torch.bfloat16, torch.float16)
    return queries.device.type == "cuda" and queries.dtype in (torch.bfloat16, torch.float16) and queries.shape[-1] <= 256


def _flash(queries: Tensor, keys: Tensor, values: Tensor, scaling: float, causal: bool) -> tuple[Tensor, Tensor]:
    """(out, natural-log lse) of torch's flash kernel, `[1, H, T, D]` each with the same number of heads."""
    if queries.device.type == "cpu":
        flash: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return flash(queries, keys, values, 0.0, causal, attn_mask=None, scale=scaling)
    pad = -queries.shape[-1] % 8
    if pad:
        queries, keys, values = (torch.nn.functional.pad(x, (0, pad)) for x in (queries, keys, values))
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(queries, keys, values, 0.0, causal, False, scale=scaling)
    return out[..., : out.shape[-1] - pad], lse[..., : queries.shape[2]]


def _math(queries: Tensor, keys: Tensor, values: Tensor, scaling: float, softcap: float, causal: bool) -> Partial:
    kv_heads = keys.shape[0]
    parts = []
    for start in range(0, queries.shape[1], _MATH_QUERIES):
        grouped = queries[:, start : start + _MATH_QUERIES].float().unflatten(0, (kv_heads, -1)).unsqueeze(0)
        logits = torch.einsum("bhgtd,hnd->bhgtn", grouped, keys.float()) * scaling
        if softcap:
            logits = softcap * torch.tanh(logits / softcap)
        if causal:
            t = torch.arange(start, start + grouped.shape[3], device=keys.device).unsqueeze(1)
            logits = logits.masked_fill(torch.arange(keys.shape[1], device=keys.device) > t, float("-inf"))
        parts.append(softmax_rows(logits, values.float().unsqueeze(0)))
    return Partial(torch.cat([p.out for p in parts], 2), torch.cat([p.lse for p in parts], 2))

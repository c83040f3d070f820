"""Scores of a zone's keys by the last queries, by Triton: log-sum-exps first, then mean shares. Logits are never stored.

Dialect: capitals are sizes, `i_` indices, `o_` offsets, `p_` pointers, `m_` masks, `b_` values.
"""

# A launch takes what only Triton knows.
# pyright: reportCallIssue=false, reportIndexIssue=false, reportArgumentType=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvrecall.core.launch import cdiv, launch, next_power_of_2
from kvrecall.select.queries import ObservedQueries


@triton.jit
def rows_of(p_queries, i_h, first, start, HEAD, TOKEN, ROWS, G: tl.constexpr, W, D: tl.constexpr, BD: tl.constexpr,
            M: tl.constexpr):  # fmt: skip
    """(queries `[M, BD]`, their positions int32 `[M]`, whether they exist): rows first to first + M - 1 of the G x W queries
    of KV head i_h. queries `[H_q, W, D]` with strides HEAD and TOKEN; start: position of the first of W."""
    o_m, o_d = first + tl.arange(0, M), tl.arange(0, BD)
    m_m = o_m < ROWS
    p_row = p_queries + (i_h * G + o_m // W).to(tl.int64) * HEAD + (o_m % W) * TOKEN
    return tl.load(p_row[:, None] + o_d[None, :], mask=m_m[:, None] & (o_d < D)[None, :], other=0.0), start + o_m % W, m_m


@triton.jit
def logits_of(b_q, b_position, p_keys, i_n, tokens, begin, scaling, D: tl.constexpr, BD: tl.constexpr, N: tl.constexpr):
    """Logits `[M, N]` in base 2 with the keys i_n to i_n + N - 1 of `[tokens, D]`, contiguous, at positions from `begin` on;
    -inf for keys that a query does not see."""
    o_n, o_d = i_n + tl.arange(0, N), tl.arange(0, BD)
    m_n = o_n < tokens
    b_k = tl.load(p_keys + o_n.to(tl.int64)[:, None] * D + o_d[None, :], mask=m_n[:, None] & (o_d < D)[None, :], other=0.0)
    b_z = tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * (scaling * 1.4426950408889634)
    return tl.where(m_n[None, :] & (begin + o_n[None, :] <= b_position[:, None]), b_z, float("-inf"))


@triton.jit(do_not_specialize=["tokens", "begin", "start"])
def mass_kernel(
    p_queries, p_keys, p_lse, tokens, begin, start, scaling, HEAD, TOKEN, KEYS_H, ROWS, W, HEADS,
    G: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, M: tl.constexpr, N: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Program (TILES tiles of N keys, KV head, M queries): log-sum-exps fp32 `[parts, H_kv, ROWS]` of their logits.

    keys `[H_kv, tokens, D]`, heads KEYS_H apart. Other arguments: see `rows_of` and `logits_of`.
    """
    i_part, i_h, first = tl.program_id(0), tl.program_id(1), tl.program_id(2) * M
    b_q, b_position, m_m = rows_of(p_queries, i_h, first, start, HEAD, TOKEN, ROWS, G, W, D, BD, M)
    p_own, end = p_keys + i_h.to(tl.int64) * KEYS_H, tl.minimum((i_part + 1) * TILES * N, tokens)
    b_peak, b_total = tl.full([M], float("-inf"), tl.float32), tl.zeros([M], tl.float32)
    for i_n in range(i_part * TILES * N, end, N):
        b_z = logits_of(b_q, b_position, p_own, i_n, tokens, begin, scaling, D, BD, N)
        b_high = tl.maximum(b_peak, tl.max(b_z, 1))
        b_base = tl.where(b_high == float("-inf"), 0.0, b_high)
        b_total = b_total * tl.exp2(b_peak - b_base) + tl.sum(tl.exp2(b_z - b_base[:, None]), 1)
        b_peak = b_high
    b_lse = (b_peak + tl.log2(tl.where(b_total > 0, b_total, 1.0))) * 0.6931471805599453
    o_m = first + tl.arange(0, M)
    tl.store(p_lse + (i_part * HEADS + i_h) * ROWS + o_m, tl.where(b_total > 0, b_lse, float("-inf")), mask=m_m)


@triton.jit(do_not_specialize=["tokens", "begin", "start"])
def share_kernel(
    p_queries, p_keys, p_total, p_scores, tokens, begin, start, scaling, HEAD, TOKEN, KEYS_H, SCORES_H, ROWS, W,
    G: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Program (N keys, KV head): scores fp32 `[H_kv, tokens]`, heads SCORES_H apart: the mean over all queries of a key's share
    of the softmax, whose log-sum-exp is total fp32 `[H_kv, ROWS]`. Other arguments as in `mass_kernel`."""
    i_n, i_h = tl.program_id(0) * N, tl.program_id(1)
    b_score = tl.zeros([N], tl.float32)
    for first in range(0, ROWS, M):
        b_q, b_position, m_m = rows_of(p_queries, i_h, first, start, HEAD, TOKEN, ROWS, G, W, D, BD, M)
        b_total = tl.load(p_total + i_h * ROWS + first + tl.arange(0, M), mask=m_m, other=0.0) * 1.4426950408889634
        b_z = logits_of(b_q, b_position, p_keys + i_h.to(tl.int64) * KEYS_H, i_n, tokens, begin, scaling, D, BD, N)
        b_score += tl.sum(tl.where(m_m[:, None], tl.exp2(b_z - b_total[:, None]), 0.0), 0)
    o_n = i_n + tl.arange(0, N)
    tl.store(p_scores + i_h.to(tl.int64) * SCORES_H + o_n, b_score / ROWS, mask=o_n < tokens)


_QUERIES, _KEYS, _TILES = 128, 64, 8
"""Queries and keys of a matrix product, and products per program of the log-sum-exps."""


def mass(observed: ObservedQueries, keys: Tensor, start: int, scaling: float) -> Tensor:
    """As `choice._mass`, for 16-bit queries and keys."""
    (heads, tokens, _), window, group = keys.shape, observed.queries.shape[1], _group(observed, keys)
    parts, rows = cdiv(tokens, _KEYS * _TILES), group * window
    lse = torch.empty(parts, heads, rows, dtype=torch.float32, device=keys.device)
    queries, keys, sizes = _laid_out(observed, keys)
    with torch.cuda.device_of(keys):  # Triton launches on the current device, which may be another one
        launch(mass_kernel, (parts, heads, cdiv(rows, _QUERIES)))(
            queries, keys, lse, tokens, start, observed.start, scaling, *queries.stride()[:2], keys.stride(0), rows, window,
            heads, TILES=_TILES, **sizes,
        )  # fmt: skip
    return lse.logsumexp(0).view(heads, group, window)


def mean_shares(observed: ObservedQueries, keys: Tensor, start: int, scaling: float, total: Tensor, scores: Tensor) -> None:
    """As `choice._mean_shares`, for 16-bit queries and keys."""
    (heads, tokens, _), window = keys.shape, observed.queries.shape[1]
    queries, keys, sizes = _laid_out(observed, keys)
    assert scores.stride(1) == 1
    with torch.cuda.device_of(keys):
        launch(share_kernel, (cdiv(tokens, _KEYS), heads))(
            queries, keys, total.contiguous(), scores, tokens, start, observed.start, scaling, *queries.stride()[:2],
            keys.stride(0), scores.stride(0), _group(observed, keys) * window, window, **sizes,
        )  # fmt: skip


def _group(observed: ObservedQueries, keys: Tensor) -> int:
    return observed.queries.shape[0] // keys.shape[0]


def _laid_out(observed: ObservedQueries, keys: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Queries and keys as the kernels read them, and the kernels' sizes."""
    queries, dim = observed.queries, keys.shape[2]
    queries = queries if queries.stride(2) == 1 else queries.contiguous()
    keys = keys if keys.stride(2) == 1 and keys.stride(1) == dim else keys.contiguous()
    padded = max(16, next_power_of_2(dim))  # the least depth of a matrix product
    sizes = {"G": _group(observed, keys), "D": dim, "BD": padded, "M": _QUERIES, "N": _KEYS, "num_warps": 8, "num_stages": 2}
    return queries, keys, sizes

"""Decode attention over a set of rows on a GPU: split over rows and merged by log-sum-exp.

Rows on the device and rows in page-locked host memory are attended in place, without a gather or concatenation. All sums are
fp32. Bytes: 2 D numbers per row and KV head, once for all query heads of a group; and per 16 rows and query head D fp32 numbers
written and read again.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvrecall.attend.kernels import attend_block
from kvrecall.core.launch import cdiv, launch, next_power_of_2
from kvrecall.core.structs import HostRows, Partial, Rows
from kvrecall.core.triton import load_rows
from kvrecall.merge.kernels import merge_splits

_PART_ROWS = 16
"""Rows per program."""


@triton.jit
def rows_kernel(
    p_queries, p_rows, p_lengths, p_out, p_lse, scaling, softcap, HEADS, T, LENGTH_B, LENGTH_H,
    D: tl.constexpr, BD: tl.constexpr, G: tl.constexpr, R: tl.constexpr, PARTS: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Program (sequence and KV head, part): R of the T rows `[BH, T, 2, D]`, up to the head's length.

    lengths int32 by strides LENGTH_B, LENGTH_H. Writes part number i_p of out fp32 `[BH, G, PARTS, D]`, lse `[BH, G, PARTS]`.
    """
    i_bh, i_p = tl.program_id(0).to(tl.int64), tl.program_id(1)
    length = tl.load(p_lengths + (i_bh // HEADS) * LENGTH_B + (i_bh % HEADS) * LENGTH_H)
    o_r, o_d = i_p * R + tl.arange(0, R), tl.arange(0, BD)
    m_r = (o_r < length) & (o_r < T)
    m_row = m_r[:, None] & (o_d < D)[None, :]
    p_row = p_rows + i_bh * T * (2 * D) + o_r.to(tl.int64)[:, None] * (2 * D) + o_d[None, :]
    b_k = tl.load(p_row, mask=m_row, other=0.0)  # [R, BD]
    b_v = tl.load(p_row + D, mask=m_row, other=0.0)
    attend_block(p_queries + i_bh * G * D, p_out + i_bh * G * PARTS * D, p_lse + i_bh * G * PARTS, i_p, b_k, b_v, m_r,
                 scaling, softcap, D, BD, G, PARTS, CAP)  # fmt: skip


@triton.jit(do_not_specialize=["TABLE"])
def host_rows_kernel(
    p_queries, p_ids, p_pool, p_table, p_out, p_lse, scaling, softcap, HEADS, K, TABLE,
    BLOCK: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, G: tl.constexpr, R: tl.constexpr, PARTS: tl.constexpr,
    CAP: tl.constexpr,
):  # fmt: skip
    """As `rows_kernel`, for the rows of ids int32 `[BH, K]` (-1: none) in blocks of host memory.

    pool `[blocks, HEADS, BLOCK, 2, D]`; table int32 `[B, TABLE]`: the blocks of each sequence, see `load_rows`.
    """
    i_bh, i_p = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i_kv = i_bh % HEADS
    o_k = i_p * R + tl.arange(0, R)
    b_id = tl.load(p_ids + i_bh * K + o_k, mask=o_k < K, other=-1)  # [R]
    m_r, p_own = b_id >= 0, p_table + (i_bh // HEADS) * TABLE
    b_k, b_v = load_rows(p_pool, p_own, b_id, m_r, m_r, i_kv, HEADS, p_queries, BLOCK, D, BD)  # [R, BD]
    attend_block(p_queries + i_bh * G * D, p_out + i_bh * G * PARTS * D, p_lse + i_bh * G * PARTS, i_p, b_k, b_v, m_r,
                 scaling, softcap, D, BD, G, PARTS, CAP)  # fmt: skip


def attend_rows(queries: Tensor, rows: Rows | HostRows, scaling: float, softcap: float = 0.0) -> Partial:
    """As `reference.attend_rows`, for T_q = 1; queries `[B, H_q, 1, D]` on the device that holds or reads the rows."""
    b, heads, _, dim = queries.shape
    kv_heads = rows.kv.shape[1] if isinstance(rows, Rows) else rows.ids.shape[1]
    # A power of two, so that few sizes are compiled; parts without rows are empty.
    parts = next_power_of_2(max(1, cdiv(rows.width, _PART_ROWS)))
    out = queries.new_empty(b * heads, parts, dim, dtype=torch.float32)
    lse = queries.new_empty(b * heads, parts, dtype=torch.float32)
    sizes = {
        "D": dim, "BD": next_power_of_2(dim), "G": heads // kv_heads, "R": _PART_ROWS, "PARTS": parts, "CAP": softcap != 0,
        "num_warps": 4,
    }  # fmt: skip
    queries, grid = queries.contiguous(), (b * kv_heads, parts)
    with torch.cuda.device_of(queries):  # Triton launches on the current device, which may be another one
        if isinstance(rows, Rows):
            launch(rows_kernel, grid)(
                queries, rows.kv.contiguous(), rows.lengths, out, lse, scaling, softcap, kv_heads, rows.width,
                *rows.lengths.stride(), **sizes,
            )  # fmt: skip
        else:
            table = rows.table
            launch(host_rows_kernel, grid)(
                queries, rows.ids.contiguous(), table.pool, table.blocks, out, lse, scaling, softcap, kv_heads, rows.width,
                table.blocks.stride(0), BLOCK=table.block_size, **sizes,
            )  # fmt: skip
        merged, total = merge_splits(out, lse)
    return Partial(merged.view(b, heads, 1, dim), total.view(b, heads, 1))

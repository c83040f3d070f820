"""One decode step's attention to all rows, on the device, in a fixed number of parts.

For layers of captured decoding that never search, and for sliding windows: if there is no room, a new row replaces the oldest.
Bytes: 4 D per row and KV head in 16-bit types, once for all query heads of a group.
"""

# Kernel launches take arguments that type checkers do not know.
# pyright: reportCallIssue=false, reportIndexIssue=false, reportArgumentType=false, reportAssignmentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvrecall.attend.kernels import store_new
from kvrecall.core.launch import cdiv, launch, next_power_of_2, overlapping
from kvrecall.core.structs import AttentionParams
from kvrecall.core.triton import begin, capped, end
from kvrecall.merge.kernels import merge_step

_MOST_PARTS = 64
_ROW_BYTES = 16384
"""Bytes of keys that one step of a program's loop reads, at most."""


@triton.jit
def whole_kernel(
    p_queries, p_keys, p_values, p_rows, p_counts, p_bad, p_out, p_lse, scaling, softcap, HEADS, CAPACITY,
    D: tl.constexpr, BD: tl.constexpr, G: tl.constexpr, R: tl.constexpr, PARTS: tl.constexpr, CAP: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (sequence and KV head, part): a PARTS-th of the rows `[BH, CAPACITY, 2, D]`, R at a time, with a running softmax.

    counts int32 `[B]`: rows stored before this step; row n is at n % CAPACITY, so the last CAPACITY rows are there. The step's
    token `[BH, D]` is attended to where the model put it, and stored as the next row; bad[b] becomes 1 if it is not finite.
    Weights are rounded to the values' dtype, sums are fp32.
    """
    begin(PDL)
    i_bh, i_p = tl.program_id(0), tl.program_id(1)
    BG: tl.constexpr = max(16, triton.next_power_of_2(G))
    count = tl.load(p_counts + i_bh // HEADS)
    place, real = count % CAPACITY, tl.minimum(count + 1, CAPACITY)
    share = tl.cdiv(tl.cdiv(real, PARTS), R) * R
    o_g, o_d, o_r = tl.arange(0, BG), tl.arange(0, BD), tl.arange(0, R)
    m_d = (o_d < D)[None, :]
    m_q = (o_g < G)[:, None] & m_d
    p_own = p_rows + i_bh.to(tl.int64) * CAPACITY * (2 * D)
    o_new = i_bh.to(tl.int64) * D
    b_q = tl.load(p_queries + (i_bh.to(tl.int64) * G + o_g[:, None]) * D + o_d[None, :], mask=m_q, other=0.0)
    b_peak = tl.full([BG], float("-inf"), tl.float32)
    b_total = tl.zeros([BG], tl.float32)
    b_sum = tl.zeros([BG, BD], tl.float32)
    i_r = i_p * share
    stop = tl.minimum(i_r + share, real)
    while i_r < stop:
        o_row = i_r + o_r
        m_r = o_row < stop
        m_row, m_new = m_r[:, None] & m_d, (o_row == place)[:, None]
        p_row = p_own + o_row.to(tl.int64)[:, None] * (2 * D) + o_d[None, :]
        b_k = tl.load(tl.where(m_new, p_keys + o_new + o_d[None, :], p_row), mask=m_row, other=0.0)  # [R, BD]
        b_v = tl.load(tl.where(m_new, p_values + o_new + o_d[None, :], p_row + D), mask=m_row, other=0.0)
        if (place >= i_r) & (place < tl.minimum(i_r + R, stop)):  # no other program reads or writes this row
            p_place = p_own + place.to(tl.int64) * (2 * D)
            store_new(p_keys + o_new, p_values + o_new, p_place, p_bad + i_bh // HEADS, D, BD)
        b_logit = tl.dot(b_q.to(b_k.dtype), tl.trans(b_k), input_precision="ieee") * scaling  # [BG, R]
        if CAP:
            b_logit = capped(b_logit, softcap)
        b_logit = tl.where(m_r[None, :], b_logit, float("-inf"))
        b_high = tl.maximum(b_peak, tl.max(b_logit, 1))  # at least one row is valid
        b_p = tl.exp(b_logit - b_high[:, None])
        b_old = tl.exp(b_peak - b_high)
        b_total = b_total * b_old + tl.sum(b_p, 1)
        b_sum = b_sum * b_old[:, None] + tl.dot(b_p.to(b_v.dtype), b_v, input_precision="ieee")
        b_peak = b_high
        i_r += R
    b_sum = b_sum / tl.where(b_total > 0, b_total, 1.0)[:, None]
    o_out = i_bh.to(tl.int64) * G * PARTS
    tl.store(p_out + (o_out + o_g[:, None] * PARTS + i_p) * D + o_d[None, :], b_sum, mask=m_q)
    b_lse = tl.where(b_total > 0, b_peak + tl.log(tl.where(b_total > 0, b_total, 1.0)), float("-inf"))
    tl.store(p_lse + o_out + o_g * PARTS + i_p, b_lse, mask=o_g < G)
    end(PDL)


class WholeAttention:
    """The last rows of one layer on the device, `[B, H_kv, capacity, 2, D]`, and the parts of an attention over them."""

    def __init__(self, rows: Tensor, query_heads: int) -> None:
        """rows: with room for all rows, or for as many as a token sees; then new rows replace the oldest."""
        (b, _, capacity, _, dim), device = rows.shape, rows.device
        self.rows = rows
        self.counts = torch.zeros(b, dtype=torch.int32, device=device)
        """int32 `[B]`: rows stored so far, below 2^31; row n is at n % capacity until a later one replaces it."""
        self.bad = torch.zeros(b, dtype=torch.int32, device=device)
        """Not 0 for sequences with a row that was not finite."""
        self._rows_at_once = max(16, min(64, _ROW_BYTES // (next_power_of_2(dim) * rows.element_size())))
        parts = min(_MOST_PARTS, cdiv(capacity, self._rows_at_once))
        self._out = torch.zeros(b, query_heads, parts, dim, dtype=torch.float32, device=device)
        self._lse = torch.zeros(b, query_heads, parts, dtype=torch.float32, device=device)

    def launch(self, queries: Tensor, keys: Tensor, values: Tensor, params: AttentionParams) -> Tensor:
        """Attends for queries `[B, H_q, 1, D]`, and stores keys and values `[B, H_kv, 1, D]`, all contiguous."""
        b, heads, capacity, _, dim = self.rows.shape
        parts = self._lse.shape[2]
        launch(whole_kernel, (b * heads, parts))(
            queries, keys, values, self.rows, self.counts, self.bad, self._out, self._lse, params.scaling, params.softcap,
            heads, capacity, D=dim, BD=next_power_of_2(dim), G=queries.shape[1] // heads, R=self._rows_at_once, PARTS=parts,
            CAP=params.softcap != 0, num_warps=4, **overlapping(queries.device),
        )  # fmt: skip
        out = merge_step(queries, self._out, self._lse, params.sink_logits)
        self.counts += 1
        return out

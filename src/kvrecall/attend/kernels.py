"""Decode attention by Triton: split over rows, each part with its log-sum-exp, merged by another kernel.

Resident and selected rows are parts of one attention. Selected rows are read from page-locked host memory (ParisKV section
4.2.3), or from the row cache, in the same pass. All sums are fp32. Bytes: 4 D per row and KV head in 16-bit types, once, for
all query heads of a group.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvrecall.attend.row_cache import cached_rows
from kvrecall.core.triton import capped


@triton.jit
def odd(b_x):
    """Which numbers are not finite; e4m3 has one that is none, and no infinity."""
    if b_x.dtype == tl.float8e4nv:
        m_odd = (b_x.to(tl.uint8, bitcast=True) & 0x7F) == 0x7F
    else:
        m_odd = b_x.to(tl.float32) * 0.0 != 0.0
    return m_odd


@triton.jit
def flag_odd(p_bad, b_k, b_v):
    """Sets bad[0] = 1 if keys or values, of any shape, are not all finite."""
    m_odd = odd(b_k) | odd(b_v)
    tl.store(p_bad + tl.zeros(m_odd.shape, tl.int32), 1, mask=m_odd)


@triton.jit
def store_new(p_key, p_value, p_row, p_bad, D: tl.constexpr, BD: tl.constexpr):
    """Stores the new token's key and value `[D]` as row `[2, D]`; bad[0] becomes 1 if they are not finite."""
    o_d = tl.arange(0, BD)
    b_k, b_v = tl.load(p_key + o_d, mask=o_d < D, other=0.0), tl.load(p_value + o_d, mask=o_d < D, other=0.0)
    tl.store(p_row + o_d, b_k, mask=o_d < D)
    tl.store(p_row + D + o_d, b_v, mask=o_d < D)
    flag_odd(p_bad, b_k, b_v)


@triton.jit
def computed(b_rows, b_q):
    """Rows as attention computes with them: those of e4m3 are widened to the dtype of queries b_q."""
    return b_rows.to(b_q.dtype) if b_rows.dtype == tl.float8e4nv else b_rows


@triton.jit
def attend_block(p_queries, p_out, p_lse, o_part, b_k, b_v, m_r, scaling, softcap, D: tl.constexpr, BD: tl.constexpr,
                 G: tl.constexpr, PARTS: tl.constexpr, CAP: tl.constexpr):  # fmt: skip
    """G queries over rows b_k, b_v `[R, BD]` of the cache's dtype: parts out `[G, PARTS, D]`, lse `[G, PARTS]`, fp32.

    Uses tensor cores; the queries of a group are the rows of a matrix. Weights are rounded to the values' dtype, sums are fp32.
    """
    BG: tl.constexpr = max(16, triton.next_power_of_2(G))
    o_g, o_d = tl.arange(0, BG), tl.arange(0, BD)
    m_q = (o_g < G)[:, None] & (o_d < D)[None, :]
    b_q = tl.load(p_queries + o_g[:, None] * D + o_d[None, :], mask=m_q, other=0.0)
    b_k, b_v = computed(b_k, b_q), computed(b_v, b_q)
    b_logit = tl.dot(b_q.to(b_k.dtype), tl.trans(b_k), input_precision="ieee") * scaling  # [BG, R]
    if CAP:
        b_logit = capped(b_logit, softcap)
    b_logit = tl.where(m_r[None, :], b_logit, float("-inf"))
    b_peak = tl.max(b_logit, 1)
    b_base = tl.where(b_peak == float("-inf"), 0.0, b_peak)
    b_p = tl.exp(b_logit - b_base[:, None])
    b_total = tl.sum(b_p, 1)
    b_sum = tl.dot(b_p.to(b_v.dtype), b_v, input_precision="ieee") / tl.where(b_total > 0, b_total, 1.0)[:, None]
    tl.store(p_out + (o_g[:, None] * PARTS + o_part) * D + o_d[None, :], b_sum, mask=m_q)
    tl.store(p_lse + o_g * PARTS + o_part, b_base + tl.log(b_total), mask=o_g < G)


@triton.jit
def add_tile(b_logit, b_v, b_peak, b_total, b_sum):
    """Adds a tile of logits `[BG, R]`, -inf where there is no row, and values `[R, BD]` to an attention tile by tile: largest
    logit, sum of weights and sum of weighted values `[BG, BD]` so far, fp32. Weights are rounded as in `attend_block`."""
    b_higher = tl.maximum(b_peak, tl.max(b_logit, 1))
    b_base = tl.where(b_higher == float("-inf"), 0.0, b_higher)
    b_p, b_scale = tl.exp(b_logit - b_base[:, None]), tl.exp(b_peak - b_base)
    b_sum = b_sum * b_scale[:, None] + tl.dot(b_p.to(b_v.dtype), b_v, input_precision="ieee")
    return b_higher, b_total * b_scale + tl.sum(b_p, 1), b_sum


@triton.jit
def store_part(p_out, p_lse, o_part, b_peak, b_total, b_sum, D: tl.constexpr, BD: tl.constexpr, G: tl.constexpr, PARTS):
    """Stores what `add_tile` has added up as part o_part of out `[G, PARTS, D]` and lse `[G, PARTS]`."""
    o_g, o_d = tl.arange(0, b_sum.shape[0]), tl.arange(0, BD)
    b_out = b_sum / tl.where(b_total > 0, b_total, 1.0)[:, None]
    m_out = (o_g < G)[:, None] & (o_d < D)[None, :]
    tl.store(p_out + (o_g[:, None] * PARTS + o_part) * D + o_d[None, :], b_out, mask=m_out)
    b_base = tl.where(b_peak == float("-inf"), 0.0, b_peak)
    tl.store(p_lse + o_g * PARTS + o_part, b_base + tl.log(b_total), mask=o_g < G)


@triton.jit
def empty_part(p_lse, o_part, G: tl.constexpr, PARTS):
    """Part o_part of lse `[G, PARTS]` has no rows; a merge does not read its numbers."""
    o_g = tl.arange(0, triton.next_power_of_2(G))
    tl.store(p_lse + o_g * PARTS + o_part, float("-inf"), mask=o_g < G)


@triton.jit
def window_rows(p_rows, p_length, p_key, p_value, o_r, CAPACITY, SINK, D: tl.constexpr, BD: tl.constexpr):
    """K and V `[R, BD]` of resident rows o_r of `[CAPACITY, 2, D]`, and a mask of the valid ones.

    The first length[0] rows are the sink. Rows from SINK on are a ring, with length[1] valid rows from place length[2] on.
    The new token's row, length[3], is read from key and value `[D]`, where the model put it.
    """
    o_d = tl.arange(0, BD)
    o_age = o_r - SINK - tl.load(p_length + 2)
    o_age = tl.where(o_age < 0, o_age + (CAPACITY - SINK), o_age)
    m_r = tl.where(o_r < SINK, o_r < tl.load(p_length), o_age < tl.load(p_length + 1)) & (o_r < CAPACITY)
    m_new, m_row = (o_r == tl.load(p_length + 3))[:, None], m_r[:, None] & (o_d < D)[None, :]
    p_row = p_rows + o_r[:, None] * (2 * D) + o_d[None, :]
    b_k = tl.load(tl.where(m_new, p_key + o_d[None, :], p_row), mask=m_row, other=0.0)
    b_v = tl.load(tl.where(m_new, p_value + o_d[None, :], p_row + D), mask=m_row, other=0.0)
    return b_k, b_v, m_r


@triton.jit
def readers_first(i_program, pairs, CHOSEN: tl.constexpr):
    """(pair of sequence and KV head, part of the step) of a program: parts that read the host come first, head by head.

    So the other work overlaps with the bus. Rows of one head are near each other, so that address translation for the bus finds
    their pages in its cache, which is smaller than a batch's pools.
    """
    readers = pairs * CHOSEN
    behind = i_program - readers
    i_pair = tl.where(i_program < readers, i_program // CHOSEN, behind % pairs)
    return i_pair, tl.where(i_program < readers, i_program % CHOSEN, CHOSEN + behind // pairs)


@triton.jit
def step_part(
    p_queries, p_keys, p_values, p_rows, p_zone, p_bad, p_ids, p_pool, p_table, cache, p_read, p_out, p_lse, scaling, softcap,
    i_bh, i_kv, i_part, HEADS, CAPACITY, SINK, K,
    BLOCK: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, G: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
    CHOSEN: tl.constexpr, PARTS: tl.constexpr, CAP: tl.constexpr, WAYS: tl.constexpr,
):  # fmt: skip
    """Part number i_part of one decode step of a sequence and KV head: CHOSEN parts of R selected rows, then parts of W rows
    that are resident, `[bh, CAPACITY, 2, D]`. PARTS: of the step's attention, including other launches. pool, table and cache
    as in `cached_rows`. read[0] counts rows read from the host.

    The new token `[bh, D]` is attended to where the model put it, and stored in its row of the window; bad[0] becomes 1 if
    it is not finite. zone int32: lengths as in `window_rows`, then the row of the new token.
    """
    o_out = i_bh.to(tl.int64) * G * PARTS
    p_query, p_part, p_part_lse = p_queries + i_bh.to(tl.int64) * G * D, p_out + o_out * D, p_lse + o_out
    if i_part < CHOSEN:
        o_k = i_part * R + tl.arange(0, R)
        b_id = tl.load(p_ids + i_bh * K + o_k, mask=o_k < K, other=-1)
        b_k, b_v, read = cached_rows(p_pool, p_table, cache, i_bh // HEADS, b_id, i_kv, HEADS, BLOCK, D, BD, WAYS)
        tl.atomic_add(p_read, read.to(tl.int64), sem="relaxed")
        attend_block(p_query, p_part, p_part_lse, i_part, b_k, b_v, b_id >= 0, scaling, softcap, D, BD, G, PARTS, CAP)
    else:
        first, new = (i_part - CHOSEN) * W, tl.load(p_zone + 3)
        p_own, o_new = p_rows + i_bh.to(tl.int64) * CAPACITY * (2 * D), i_bh.to(tl.int64) * D
        b_own_k, b_own_v, m_r = window_rows(p_own, p_zone, p_keys + o_new, p_values + o_new, first + tl.arange(0, W), CAPACITY,
                                            SINK, D, BD)  # fmt: skip
        if (new >= first) & (new < first + W):  # no other program reads or writes this row
            store_new(p_keys + o_new, p_values + o_new, p_own + new * (2 * D), p_bad, D, BD)
        attend_block(p_query, p_part, p_part_lse, i_part, b_own_k, b_own_v, m_r, scaling, softcap, D, BD, G, PARTS, CAP)

"""Decode attention by Triton: split over rows, each part with its log-sum-exp, merged by another kernel.

Resident and selected rows are parts of one attention. Selected rows are read from page-locked host memory (ParisKV section
4.2.3), or from the device if the last step kept them, in the same pass. All sums are fp32. Bytes: 4 D per row and KV head in
16-bit types, once, for all query heads of a group.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvrecall.core.triton import capped, load_rows


@triton.jit
def flag_odd(p_bad, b_k, b_v):
    """Sets bad[0] = 1 if keys or values, of any shape, are not all finite."""
    m_odd = (b_k.to(tl.float32) * 0.0 != 0.0) | (b_v.to(tl.float32) * 0.0 != 0.0)
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
def attend_block(p_queries, p_out, p_lse, o_part, b_k, b_v, m_r, scaling, softcap, D: tl.constexpr, BD: tl.constexpr,
                 G: tl.constexpr, PARTS: tl.constexpr, CAP: tl.constexpr):  # fmt: skip
    """G queries over rows b_k, b_v `[R, BD]` of the cache's dtype: parts out `[G, PARTS, D]`, lse `[G, PARTS]`, fp32.

    Uses tensor cores; the queries of a group are the rows of a matrix. Weights are rounded to the values' dtype, sums are fp32.
    """
    BG: tl.constexpr = max(16, triton.next_power_of_2(G))
    o_g, o_d = tl.arange(0, BG), tl.arange(0, BD)
    m_q = (o_g < G)[:, None] & (o_d < D)[None, :]
    b_q = tl.load(p_queries + o_g[:, None] * D + o_d[None, :], mask=m_q, other=0.0).to(b_k.dtype)
    b_logit = tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * scaling  # [BG, R]
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
def selected_rows(
    p_pool, p_table, p_kept_ids, p_kept, i_now, i_then, p_read, b_id, o_k, i_kv, HEADS, K,
    BLOCK: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BK: tl.constexpr, REUSE: tl.constexpr,
):  # fmt: skip
    """K and V `[R, BD]` of selected rows: entries o_k of a selection with ids `[R]` (-1: none).

    pool `[blocks, HEADS, BLOCK, 2, D]`: the layer's rows on the host; table: the sequence's blocks, see `load_rows`. REUSE:
    kept `[·, K, 2, D]` holds rows of earlier steps, kept_ids int32 `[·, K]` their ids; rows come from selection i_then, int64,
    and are kept as i_now, int64 (< 0: not kept). Without REUSE nothing is kept. read[0] counts rows read from the host.
    """
    o_d = tl.arange(0, BD)
    m_d = (o_d < D)[None, :]
    m_r = b_id >= 0
    if REUSE:
        o_now, o_then = i_now * K, i_then * K
        b_slot = tl.full(b_id.shape, -1, tl.int32)
        KEPT: tl.constexpr = min(BK, max(16, 4096 // b_id.shape[0]))  # compared at a time, to limit registers
        for i_k in tl.static_range(0, BK, KEPT):
            o_all = i_k + tl.arange(0, KEPT)
            b_then = tl.load(p_kept_ids + o_then + o_all, mask=o_all < K, other=-1)
            m_same = (b_id[:, None] == b_then[None, :]) & m_r[:, None]
            b_slot = tl.maximum(b_slot, tl.max(tl.where(m_same, o_all[None, :], -1), 1))
        m_kept = (b_slot >= 0)[:, None] & m_d
        m_host = m_r & (b_slot < 0)
        p_then = p_kept + (o_then + b_slot)[:, None] * (2 * D) + o_d[None, :]
        b_k, b_v = load_rows(p_pool, p_table, b_id, m_r, m_host, i_kv, HEADS, p_kept, BLOCK, D, BD)
        b_k = tl.where(m_kept, tl.load(p_then, mask=m_kept, other=0.0), b_k)
        b_v = tl.where(m_kept, tl.load(p_then + D, mask=m_kept, other=0.0), b_v)
        p_now = p_kept + (o_now + o_k)[:, None] * (2 * D) + o_d[None, :]
        m_now = (o_k < K) & (i_now >= 0)
        tl.store(p_now, b_k, mask=m_now[:, None] & m_d)
        tl.store(p_now + D, b_v, mask=m_now[:, None] & m_d)
        tl.store(p_kept_ids + o_now + o_k, b_id, mask=m_now)
    else:
        m_host = m_r
        b_k, b_v = load_rows(p_pool, p_table, b_id, m_r, m_r, i_kv, HEADS, p_kept, BLOCK, D, BD)
    tl.atomic_add(p_read, tl.sum(m_host.to(tl.int32), 0).to(tl.int64), sem="relaxed")
    return b_k, b_v


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
    p_queries, p_keys, p_values, p_rows, p_zone, p_bad, p_ids, p_pool, p_table, p_kept_ids, p_kept, p_parity, p_read, p_out,
    p_lse, scaling, softcap, i_bh, i_kv, i_part, HEADS, CAPACITY, SINK, PAIRS, K,
    BLOCK: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, G: tl.constexpr, R: tl.constexpr, W: tl.constexpr, BK: tl.constexpr,
    CHOSEN: tl.constexpr, PARTS: tl.constexpr, CAP: tl.constexpr, REUSE: tl.constexpr,
):  # fmt: skip
    """Part number i_part of one decode step of a sequence and KV head: CHOSEN parts of R selected rows, then parts of W rows
    that are resident, `[PAIRS, CAPACITY, 2, D]`. PARTS: of the step's attention, including other launches. pool and table as in
    `selected_rows`.

    The new token `[PAIRS, D]` is attended to where the model put it, and stored in its row of the window; bad[0] becomes 1 if
    it is not finite. zone int32: lengths as in `window_rows`, then the row of the new token.
    """
    o_out = i_bh.to(tl.int64) * G * PARTS
    p_query, p_part, p_part_lse = p_queries + i_bh.to(tl.int64) * G * D, p_out + o_out * D, p_lse + o_out
    if i_part < CHOSEN:
        o_k = i_part * R + tl.arange(0, R)
        b_id = tl.load(p_ids + i_bh * K + o_k, mask=o_k < K, other=-1)
        now = tl.load(p_parity)
        i_now, i_then = now * PAIRS + i_bh, (1 - now) * PAIRS + i_bh
        b_k, b_v = selected_rows(p_pool, p_table, p_kept_ids, p_kept, i_now, i_then, p_read, b_id, o_k, i_kv, HEADS, K, BLOCK,
                                 D, BD, BK, REUSE)  # fmt: skip
        attend_block(p_query, p_part, p_part_lse, i_part, b_k, b_v, b_id >= 0, scaling, softcap, D, BD, G, PARTS, CAP)
    else:
        first, new = (i_part - CHOSEN) * W, tl.load(p_zone + 3)
        p_own, o_new = p_rows + i_bh.to(tl.int64) * CAPACITY * (2 * D), i_bh.to(tl.int64) * D
        b_own_k, b_own_v, m_r = window_rows(p_own, p_zone, p_keys + o_new, p_values + o_new, first + tl.arange(0, W), CAPACITY,
                                            SINK, D, BD)  # fmt: skip
        if (new >= first) & (new < first + W):  # no other program reads or writes this row
            store_new(p_keys + o_new, p_values + o_new, p_own + new * (2 * D), p_bad, D, BD)
        attend_block(p_query, p_part, p_part_lse, i_part, b_own_k, b_own_v, m_r, scaling, softcap, D, BD, G, PARTS, CAP)

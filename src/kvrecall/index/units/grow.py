"""How units grow in a device step: the buffer of a full window becomes pages, or its oldest segment becomes a unit."""

from __future__ import annotations

import triton
import triton.language as tl

from kvrecall.cache.slot_kernels import IDLE, ZONE_FIELDS, keep_token, leaving, move_on
from kvrecall.core.triton import as_stored, begin, end


@triton.jit
def table_of(p_plan, p_like):
    """Addresses in a plan's row: representations of p_like's dtype, members, offsets."""
    p_reps = tl.multiple_of(tl.load(p_plan + 2).to(tl.pointer_type(p_like.dtype.element_ty)), 16)
    p_members = tl.load(p_plan + 4).to(tl.pointer_type(tl.int32))
    return p_reps, p_members, tl.load(p_plan + 6).to(tl.pointer_type(tl.int32))


@triton.jit
def add_members(p_members, first, tokens, moved, T: tl.constexpr):
    """members[tokens + i] = first + i for the tokens that have left the window."""
    i = 0
    while i < moved:
        o_t = i + tl.arange(0, T)
        tl.store(p_members + tokens + o_t, first + o_t, mask=o_t < moved)
        i += T


@triton.jit
def segment_kernel(
    p_queries, p_lse, p_rows, p_zone, p_pool, p_table, p_plan, p_marks, p_resident, p_log, p_log_lse, HEADS, TABLE, CAPACITY,
    FRONT, LOCAL, INTERVAL, LONGEST, MARKED, WINDOW,
    BLOCK: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, G: tl.constexpr, BM: tl.constexpr, T: tl.constexpr,
    FIELDS: tl.constexpr, LOG: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (sequence and KV head): the oldest segment of a full window becomes a unit, its mean key (LouisKV section 4.2).

    A segment ends before the next marked token (marks uint8 `[B, MARKED]`), or after LONGEST <= BM tokens. The new unit goes to
    the table whose addresses are in the program's row of plan int64 `[bh, FIELDS]`; the row's counts grow by one.
    """
    begin(PDL)
    i_bh = tl.program_id(0)
    i_b = i_bh // HEADS
    p_zone, p_plan = p_zone + i_bh * ZONE_FIELDS, p_plan + i_bh * FIELDS
    if tl.load(p_zone + 6) == IDLE:
        return
    p_rows += i_bh.to(tl.int64) * CAPACITY * (2 * D)
    keep_token(p_queries, p_lse, p_rows, p_zone, p_pool, p_table, p_resident, p_log, p_log_lse, i_bh, HEADS, TABLE, WINDOW,
               BLOCK, D, BD, G, LOG)  # fmt: skip
    first, token = tl.load(p_zone + 4), tl.load(p_zone + 5)
    moved = leaving(p_zone, LOCAL, INTERVAL)
    if moved > 0:
        o_m = first + 1 + tl.arange(0, BM)
        b_mark = tl.load(p_marks + i_b.to(tl.int64) * MARKED + o_m, mask=o_m <= token, other=0)
        moved = tl.minimum(moved, tl.min(tl.where(b_mark != 0, o_m, first + LONGEST), 0) - first)
        moved = tl.minimum(moved, LONGEST)
        o_d, o_t = tl.arange(0, BD), tl.arange(0, T)
        b_sum = tl.zeros([BD], tl.float64)
        i = 0
        while i < moved:
            b_row = FRONT + (first + i + o_t) % (CAPACITY - FRONT)
            m_row = (i + o_t < moved)[:, None] & (o_d < D)[None, :]
            b_k = tl.load(p_rows + b_row[:, None].to(tl.int64) * (2 * D) + o_d[None, :], mask=m_row, other=0.0)
            b_sum += tl.sum(as_stored(b_k, p_pool).to(tl.float64), 0)
            i += T
        unit, tokens = tl.load(p_plan), tl.load(p_plan + 1)
        p_reps, p_members, p_offsets = table_of(p_plan, p_rows)
        b_mean = (b_sum / moved).to(tl.float32).to(p_reps.dtype.element_ty)
        tl.store(p_reps + unit * D + o_d, b_mean, mask=o_d < D)
        add_members(p_members, first, tokens, moved, T)
        tl.store(p_offsets + unit + 1, (tokens + moved).to(tl.int32))
        tl.debug_barrier()
        tl.store(p_plan, unit + 1)
        tl.store(p_plan + 1, tokens + moved)
    move_on(p_zone, moved, CAPACITY - FRONT, FRONT)
    end(PDL)


@triton.jit
def page_kernel(
    p_queries, p_lse, p_rows, p_zone, p_pool, p_table, p_plan, p_tails, p_resident, p_log, p_log_lse, HEADS, TABLE, CAPACITY,
    FRONT, LOCAL, INTERVAL, WINDOW,
    BLOCK: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, G: tl.constexpr, PAGE: tl.constexpr, T: tl.constexpr,
    SPREAD: tl.constexpr, POINTS: tl.constexpr, FIELDS: tl.constexpr, LOG: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (sequence and KV head): the buffer of a full window becomes pages of PAGE <= T tokens, from the partial one on.

    tails `[bh, PAGE, D]`: keys of the last page if it is partial. A representation has POINTS * D numbers: mean key, or
    mean ± mean deviation (SPREAD), or extremes; see `units.volumes`. The rest as in `segment_kernel`.
    """
    begin(PDL)
    i_bh = tl.program_id(0)
    p_zone, p_plan = p_zone + i_bh * ZONE_FIELDS, p_plan + i_bh * FIELDS
    if tl.load(p_zone + 6) == IDLE:
        return
    p_rows += i_bh.to(tl.int64) * CAPACITY * (2 * D)
    keep_token(p_queries, p_lse, p_rows, p_zone, p_pool, p_table, p_resident, p_log, p_log_lse, i_bh, HEADS, TABLE, WINDOW,
               BLOCK, D, BD, G, LOG)  # fmt: skip
    first = tl.load(p_zone + 4)
    moved = leaving(p_zone, LOCAL, INTERVAL)
    if moved > 0:
        tokens = tl.load(p_plan + 1).to(tl.int32)
        page, rest = tokens // PAGE, tokens % PAGE
        o_d, o_t = tl.arange(0, BD), tl.arange(0, T)
        p_tail = p_tails + i_bh.to(tl.int64) * PAGE * D
        p_reps, p_members, p_offsets = table_of(p_plan, p_rows)
        i = 0
        while i < rest + moved:
            o_x = i + o_t
            m_x = (o_t < PAGE) & (o_x < rest + moved)
            m_row = m_x[:, None] & (o_d < D)[None, :]
            b_row = FRONT + (first + tl.maximum(o_x - rest, 0)) % (CAPACITY - FRONT)
            p_row = p_rows + b_row[:, None].to(tl.int64) * (2 * D) + o_d[None, :]
            m_old = (o_x < rest)[:, None]
            b_new = as_stored(tl.load(p_row, mask=m_row & (o_x >= rest)[:, None], other=0.0), p_pool)
            b_old = tl.load(p_tail + o_x[:, None] * D + o_d[None, :], mask=m_row & m_old, other=0.0)
            b_key = tl.where(m_old, b_old, b_new)
            b_k = b_key.to(tl.float32)
            size = tl.minimum(rest + moved - i, PAGE)
            p_rep = p_reps + page.to(tl.int64) * (POINTS * D) + o_d
            if POINTS == 1 or SPREAD:
                b_centre = tl.sum(b_k, 0) / size
                b_high, b_low = b_centre, b_centre
                if POINTS == 2:
                    b_spread = tl.sum(tl.where(m_row, tl.abs(b_k - b_centre[None, :]), 0.0), 0) / size
                    b_high, b_low = b_centre + b_spread, b_centre - b_spread
            else:
                b_high = tl.max(tl.where(m_row, b_k, float("-inf")), 0)
                b_low = tl.min(tl.where(m_row, b_k, float("inf")), 0)
            tl.store(p_rep, tl.cast(b_high, p_reps.dtype.element_ty), mask=o_d < D)
            if POINTS == 2:
                tl.store(p_rep + D, tl.cast(b_low, p_reps.dtype.element_ty), mask=o_d < D)
            tl.debug_barrier()  # the old tail has been read
            if size < PAGE:
                tl.store(p_tail + o_t[:, None] * D + o_d[None, :], b_key, mask=m_row)
            page += 1
            i += PAGE
            tl.store(p_offsets + page, tokens - rest + tl.minimum(i, rest + moved))
        add_members(p_members, first, tokens, moved, T)
        tl.debug_barrier()
        tl.store(p_plan, page.to(tl.int64))
        tl.store(p_plan + 1, (tokens + moved).to(tl.int64))
    move_on(p_zone, moved, CAPACITY - FRONT, FRONT)
    end(PDL)

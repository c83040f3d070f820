"""How segments grow in a device step: the oldest segment of a full window becomes a unit (LouisKV section 4.2)."""

from __future__ import annotations

import triton
import triton.language as tl

from kvrecall.cache.slot_kernels import IDLE, ZONE_FIELDS, keep_token, leaving, move_on
from kvrecall.core.triton import as_stored, begin, end
from kvrecall.index.unit_kernels.grow import add_members, table_of


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

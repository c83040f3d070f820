"""What ends a captured step of a search over units: the token is stored for good, and old ones become units.

Every token lies in the host row that its number says from its own step on, so nothing is left to copy when it
leaves the window. How many leave is decided here: the host does not know where segments end. All programs of a sequence decide
the same, each for its own KV head.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvrecall.core.host_rows import row_offset

ZONE_FIELDS = tl.constexpr(7)
"""Numbers of a zone row, int32, one row per sequence and KV head: rows in front of the window (sink and static set) · window
rows with the token of this step · ring place of the oldest · row of the token of this step · numbers of the oldest window
token, which is the length of the retrieval zone, and of the token of this step · what kind of step it is: 0, TRIAL or IDLE.
Tokens count from the end of the sink."""
TRIAL, IDLE = 1, 2
"""A trial: nothing leaves the window. Idle: a slot without a sequence, of which nothing is written down."""


@triton.jit
def store_token(p_rows, p_zone, p_pool, p_table, i_kv, HEADS, BLOCK: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    """Copies the row of this step's token, out of rows `[CAPACITY, 2, D]`, to the host: pool `[blocks, HEADS, BLOCK, 2, D]`, of
    which the sequence has the blocks of its table, see `row_offset`."""
    o_d = tl.arange(0, BD)
    p_row = p_rows + tl.load(p_zone + 3).to(tl.int64) * (2 * D) + o_d
    number = tl.load(p_zone + 5)
    p_host = p_pool + row_offset(p_table, number, number >= 0, i_kv, HEADS, BLOCK, D) + o_d
    tl.store(p_host, tl.load(p_row, mask=o_d < D), mask=o_d < D)
    tl.store(p_host + D, tl.load(p_row + D, mask=o_d < D), mask=o_d < D)


@triton.jit
def remember(p_queries, p_lse, p_log, p_log_lse, place, D: tl.constexpr, BD: tl.constexpr, G: tl.constexpr):
    """Copies the queries `[G, D]` of this step and their lse `[G]` to a place of the log `[·, G, D]`, `[·, G]`."""
    o_d = tl.arange(0, BD)
    for g in range(G):
        b_q = tl.load(p_queries + g * D + o_d, mask=o_d < D)
        tl.store(p_log + (place * G + g) * D + o_d, b_q, mask=o_d < D)
        tl.store(p_log_lse + place * G + g, tl.load(p_lse + g))


@triton.jit
def keep_token(
    p_queries, p_lse, p_rows, p_zone, p_pool, p_table, p_resident, p_log, p_log_lse, i_bh, HEADS, TABLE, WINDOW,
    BLOCK: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, G: tl.constexpr, LOG: tl.constexpr,
):  # fmt: skip
    """What every step does with its token, whatever its units are: row, queries (LOG) and the count of resident rows.

    table int32 `[b, TABLE]`; the rest as in `store_token`.
    """
    i_b, i_kv = i_bh // HEADS, i_bh % HEADS
    store_token(p_rows, p_zone, p_pool, p_table + i_b * TABLE, i_kv, HEADS, BLOCK, D, BD)
    if LOG:
        o_log, place = i_bh.to(tl.int64) * WINDOW * G, tl.load(p_zone + 5) % WINDOW
        remember(p_queries + i_bh * G * D, p_lse + i_bh * G, p_log + o_log * D, p_log_lse + o_log, place, D, BD, G)
    if i_kv == 0:
        tl.store(p_resident + i_b, tl.load(p_resident + i_b) + tl.load(p_zone + 1))


@triton.jit
def leaving(p_zone, LOCAL, INTERVAL):
    """How many tokens may leave the window: what it holds beyond LOCAL, as soon as that is INTERVAL; none in a trial."""
    buffer = tl.load(p_zone + 1) - LOCAL
    return tl.where((buffer >= INTERVAL) & (tl.load(p_zone + 6) == 0), buffer, 0)


@triton.jit
def move_on(p_zone, moved, RING, FRONT):
    """The next step's row: one token more, of which `moved` have left."""
    first, token = tl.load(p_zone + 4) + moved, tl.load(p_zone + 5) + 1
    tl.debug_barrier()  # all threads have read the row
    tl.store(p_zone + 1, token + 1 - first)
    tl.store(p_zone + 2, first % RING)
    tl.store(p_zone + 3, FRONT + token % RING)
    tl.store(p_zone + 4, first)
    tl.store(p_zone + 5, token)


@triton.jit
def add_members(p_members, first, tokens, moved, T: tl.constexpr):
    """members[tokens + i] = first + i for the tokens that have left."""
    i = 0
    while i < moved:
        o_t = i + tl.arange(0, T)
        tl.store(p_members + tokens + o_t, first + o_t, mask=o_t < moved)
        i += T


@triton.jit
def segment_kernel(
    p_queries, p_lse, p_rows, p_zone, p_pool, p_table, p_plan, p_reps, p_members, p_offsets, p_marks, p_resident, p_log,
    p_log_lse, HEADS, TABLE, CAPACITY, FRONT, LOCAL, INTERVAL, LONGEST, UNITS, TOKENS, MARKED, WINDOW,
    BLOCK: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, G: tl.constexpr, BM: tl.constexpr, T: tl.constexpr,
    FIELDS: tl.constexpr, LOG: tl.constexpr,
):  # fmt: skip
    """Program (sequence and KV head): the oldest segment of a full window becomes a unit, its mean key (LouisKV section 4.2).

    A segment ends before the next marked token (marks uint8 `[B, MARKED]`), after LONGEST <= BM tokens at most. reps `[bh,
    UNITS, D]`, members int32 `[bh, TOKENS]`, offsets int32 `[bh, UNITS + 1]`, plan int64 `[bh, FIELDS]` get one unit more.
    """
    i_bh = tl.program_id(0)
    i_b = i_bh // HEADS
    p_zone, p_plan = p_zone + i_bh * ZONE_FIELDS, p_plan + i_bh * FIELDS
    if tl.load(p_zone + 6) == 2:  # IDLE
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
            b_sum += tl.sum(b_k.to(tl.float64), 0)
            i += T
        unit, tokens = tl.load(p_plan), tl.load(p_plan + 1)
        b_mean = (b_sum / moved).to(tl.float32).to(p_reps.dtype.element_ty)
        tl.store(p_reps + (i_bh.to(tl.int64) * UNITS + unit) * D + o_d, b_mean, mask=o_d < D)
        add_members(p_members + i_bh.to(tl.int64) * TOKENS, first, tokens, moved, T)
        tl.store(p_offsets + i_bh.to(tl.int64) * (UNITS + 1) + unit + 1, (tokens + moved).to(tl.int32))
        tl.debug_barrier()
        tl.store(p_plan, unit + 1)
        tl.store(p_plan + 1, tokens + moved)
    move_on(p_zone, moved, CAPACITY - FRONT, FRONT)


@triton.jit
def page_kernel(
    p_queries, p_lse, p_rows, p_zone, p_pool, p_table, p_plan, p_reps, p_members, p_offsets, p_tails, p_resident, p_log,
    p_log_lse, HEADS, TABLE, CAPACITY, FRONT, LOCAL, INTERVAL, UNITS, TOKENS, WINDOW,
    BLOCK: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, G: tl.constexpr, PAGE: tl.constexpr, T: tl.constexpr,
    SPREAD: tl.constexpr, POINTS: tl.constexpr, FIELDS: tl.constexpr, LOG: tl.constexpr,
):  # fmt: skip
    """Program (sequence and KV head): the buffer of a full window becomes pages of PAGE <= T tokens, from the partial one on.

    tails `[bh, PAGE, D]`: keys of the last page if it is partial. reps `[bh, UNITS, POINTS * D]`: mean key, or mean ± mean
    deviation (SPREAD), or extremes; see `index.pages.volumes`. The rest as in `segment_kernel`.
    """
    i_bh = tl.program_id(0)
    p_zone, p_plan = p_zone + i_bh * ZONE_FIELDS, p_plan + i_bh * FIELDS
    if tl.load(p_zone + 6) == 2:  # IDLE
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
        p_offset = p_offsets + i_bh.to(tl.int64) * (UNITS + 1)
        i = 0
        while i < rest + moved:
            o_x = i + o_t
            m_x = (o_t < PAGE) & (o_x < rest + moved)
            m_row = m_x[:, None] & (o_d < D)[None, :]
            b_row = FRONT + (first + tl.maximum(o_x - rest, 0)) % (CAPACITY - FRONT)
            p_row = p_rows + b_row[:, None].to(tl.int64) * (2 * D) + o_d[None, :]
            m_old = (o_x < rest)[:, None]
            b_new = tl.load(p_row, mask=m_row & (o_x >= rest)[:, None], other=0.0)
            b_old = tl.load(p_tail + o_x[:, None] * D + o_d[None, :], mask=m_row & m_old, other=0.0)
            b_key = tl.where(m_old, b_old, b_new)
            b_k = b_key.to(tl.float32)
            size = tl.minimum(rest + moved - i, PAGE)
            p_rep = p_reps + (i_bh.to(tl.int64) * UNITS + page) * (POINTS * D) + o_d
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
            tl.store(p_offset + page, tokens - rest + tl.minimum(i, rest + moved))
        add_members(p_members + i_bh.to(tl.int64) * TOKENS, first, tokens, moved, T)
        tl.debug_barrier()
        tl.store(p_plan, page.to(tl.int64))
        tl.store(p_plan + 1, (tokens + moved).to(tl.int64))
    move_on(p_zone, moved, CAPACITY - FRONT, FRONT)

"""The end of a device step whose zones the device counts: the token is stored, and old tokens leave the window.

Every token is written to its host row in its own step, so leaving the window copies nothing. How many leave is decided here,
because the host does not know where segments end. All programs of a sequence compute the same, each for its own KV head.

A zone row, int32, one per sequence and KV head, is: rows before the window (sink and static set) · window rows including this
step's token · ring place of the oldest · row of this step's token · number of the oldest window token, which is the length of
the retrieval zone · number of this step's token · kind of step: STEP, TRIAL or IDLE. Tokens are numbered from the end of the
sink.
"""

# The values of compile-time constants are numbers only inside a kernel, which type checkers do not know.
# pyright: reportArgumentType=false, reportAssignmentType=false

from __future__ import annotations

import triton
import triton.language as tl

from kvrecall.cache.slot_zones import IDLE as IDLE_STEP
from kvrecall.cache.slot_zones import ZONE_NUMBERS
from kvrecall.core.triton import begin, end, store_row

ZONE_FIELDS = tl.constexpr(ZONE_NUMBERS)
IDLE = tl.constexpr(IDLE_STEP)


@triton.jit
def store_token(p_rows, p_zone, p_pool, p_table, i_kv, HEADS, BLOCK: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    """Copies the row of this step's token from rows `[CAPACITY, 2, D]` to the host's pool `[blocks, HEADS, BLOCK, 2, D]`, by
    the sequence's table, see `store_row`."""
    o_d = tl.arange(0, BD)
    p_row = p_rows + tl.load(p_zone + 3).to(tl.int64) * (2 * D) + o_d
    number = tl.load(p_zone + 5)
    b_k, b_v = tl.load(p_row, mask=o_d < D, other=0.0), tl.load(p_row + D, mask=o_d < D, other=0.0)
    store_row(p_pool, p_table, number, number >= 0, i_kv, HEADS, b_k, b_v, BLOCK, D, BD)


@triton.jit
def remember(p_queries, p_lse, p_log, p_log_lse, place, D: tl.constexpr, BD: tl.constexpr, G: tl.constexpr):
    """Copies the queries `[G, D]` of this step and their lse `[G]` to a place of the log `[·, G, D]`, `[·, G]`."""
    BG: tl.constexpr = triton.next_power_of_2(G)
    o_g, o_d = tl.arange(0, BG), tl.arange(0, BD)
    m_q = (o_g < G)[:, None] & (o_d < D)[None, :]
    b_q = tl.load(p_queries + o_g[:, None] * D + o_d[None, :], mask=m_q)
    b_lse = tl.load(p_lse + o_g, mask=o_g < G)
    tl.store(p_log + (place * G + o_g)[:, None] * D + o_d[None, :], b_q, mask=m_q)
    tl.store(p_log_lse + place * G + o_g, b_lse, mask=o_g < G)


@triton.jit
def keep_token(
    p_queries, p_lse, p_rows, p_zone, p_pool, p_table, p_resident, p_log, p_log_lse, i_bh, HEADS, TABLE, WINDOW,
    BLOCK: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, G: tl.constexpr, LOG: tl.constexpr,
):  # fmt: skip
    """Stores the token's row and, with LOG, its queries; counts resident rows. The same for all indexes.

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
    """How many tokens may leave the window: all beyond LOCAL if they are at least INTERVAL; none in a trial."""
    buffer = tl.load(p_zone + 1) - LOCAL
    return tl.where((buffer >= INTERVAL) & (tl.load(p_zone + 6) == 0), buffer, 0)


@triton.jit
def move_on(p_zone, moved, RING, FRONT):
    """Writes the next step's row: one more token, `moved` tokens have left."""
    first, token = tl.load(p_zone + 4) + moved, tl.load(p_zone + 5) + 1
    tl.debug_barrier()  # all threads have read the row
    tl.store(p_zone + 1, token + 1 - first)
    tl.store(p_zone + 2, first % RING)
    tl.store(p_zone + 3, FRONT + token % RING)
    tl.store(p_zone + 4, first)
    tl.store(p_zone + 5, token)


@triton.jit
def tokens_kernel(
    p_queries, p_lse, p_rows, p_zone, p_pool, p_table, p_resident, p_log, p_log_lse, HEADS, TABLE, CAPACITY, FRONT, LOCAL,
    INTERVAL, WINDOW,
    BLOCK: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, G: tl.constexpr, LOG: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (sequence and KV head): stores the token and empties a full buffer. For summaries of single tokens, which are
    written when the token comes. See `keep_token`."""
    begin(PDL)
    i_bh = tl.program_id(0)
    p_zone += i_bh * ZONE_FIELDS
    if tl.load(p_zone + 6) == IDLE:
        return
    p_rows += i_bh.to(tl.int64) * CAPACITY * (2 * D)
    keep_token(p_queries, p_lse, p_rows, p_zone, p_pool, p_table, p_resident, p_log, p_log_lse, i_bh, HEADS, TABLE, WINDOW,
               BLOCK, D, BD, G, LOG)  # fmt: skip
    move_on(p_zone, leaving(p_zone, LOCAL, INTERVAL), CAPACITY - FRONT, FRONT)
    end(PDL)


@triton.jit(do_not_specialize=["TABLE"])
def row_kernel(
    p_new, p_rows, p_zone, p_table, HEADS, TABLE, NUMBERS, BLOCK: tl.constexpr, WIDTH: tl.constexpr, BW: tl.constexpr
):
    """Program (sequence and KV head): copies row i_bh of new `[BH, WIDTH]` to the place of this step's token.

    rows in blocks `[HEADS, BLOCK, WIDTH]`, two of them NUMBERS apart; table int32 `[B, TABLE]`: the blocks of each sequence;
    A slot without a sequence stores nothing.
    """
    i_bh = tl.program_id(0)
    p_zone += i_bh * ZONE_FIELDS
    if tl.load(p_zone + 6) == IDLE:
        return
    number, o_w = tl.load(p_zone + 5), tl.arange(0, BW)
    block = tl.load(p_table + (i_bh // HEADS) * TABLE + number // BLOCK).to(tl.int64)
    p_row = p_rows + block * NUMBERS + ((i_bh % HEADS) * BLOCK + number % BLOCK) * WIDTH + o_w
    tl.store(p_row, tl.load(p_new + i_bh * WIDTH + o_w, mask=o_w < WIDTH), mask=o_w < WIDTH)

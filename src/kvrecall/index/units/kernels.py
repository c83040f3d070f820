"""Triton kernels of the search over units: score, fill a budget, expand to token ids. `search` launches them one after another.

**Scores** for all query heads of a group, each representation read once: bounding volumes or means of keys. Bytes per unit: its
representation, 2 D numbers for a volume and D for a mean, and its 4-byte offset; written are 4 bytes per query head. Tensor
cores multiply 16-bit queries and representations of one dtype: products are exact, sums are fp32. Others are multiplied in
fp32.

**The best units that fill a budget** counted in tokens, and their token ids, without sorting and without the host. The units of
a KV head are split into chunks. A program per chunk, of one or few warps, keeps the units that would fill the budget alone; it
may keep more if there is room. What all chunks keep are candidates: few enough to be in the registers of one program. So every
program that writes ids finds the same best candidates by itself, and no program waits for another.

Both levels narrow a range of scores in which the budget is reached, to a quarter per round, by adding up sizes. The second
ends with one unit, or units of one score; these are taken from the lowest position on, and the last one is cut. The result
does not depend on timing. `select.kernels.top_kernel` does the same with counts of ids instead of sizes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from kvrecall.core.triton import begin, end
from kvrecall.index.units.plan import SCORE_STEP
from kvrecall.select.kernels import LOWEST, ordered, shares

_STEP = tl.constexpr(SCORE_STEP)
_HIGHEST = tl.constexpr(0x7FFFFFFF)


class UnitSource(NamedTuple):
    """Where the units of a batch are.

    PAGE 0: each row of plan int64 `[n, FIELDS]` says it (`plan.UNIT_FIELDS`); reps: any pointer of the representations' dtype.
    Else units are pages of PAGE tokens in an engine's blocks of BLOCK tokens: a row of plan int32 `[n, FIELDS]` begins with the
    end of the zone; reps `[blocks, H_kv, BLOCK / PAGE, ·]` with STRIDE elements between blocks; table int32 `[n, TABLE]`: the
    blocks of each sequence; scores fp32 `[n, H_kv, lanes, WIDTH]`. The first SINKS tokens are in no unit.
    """

    plan: Any
    reps: Any
    table: Any
    scores: Any
    TABLE: Any
    STRIDE: Any
    WIDTH: Any
    SINKS: Any
    FIELDS: Any
    PAGE: Any
    BLOCK: Any


@triton.jit
def unit_counts(of, i_b):
    """(units, tokens, most tokens to find) of a sequence. of: a `UnitSource`, here and below."""
    p_row = of.plan + i_b * of.FIELDS
    if of.PAGE:
        stop = tl.load(p_row)
        tokens = tl.maximum(stop - of.SINKS, 0)
        return tl.cdiv(stop, of.PAGE), tokens, tokens
    else:
        return tl.load(p_row), tl.load(p_row + 1).to(tl.int32), tl.load(p_row + 8).to(tl.int32)


@triton.jit
def unit_sizes(of, i_b, i_kv, o_u, m_u):
    """First member and size, int32, of units o_u of one KV head; both 0 if m_u is false."""
    p_row = of.plan + i_b * of.FIELDS
    if of.PAGE:
        b_first = tl.maximum(o_u * of.PAGE, of.SINKS)
        b_size = tl.minimum((o_u + 1) * of.PAGE, tl.load(p_row)) - b_first
        return tl.where(m_u, b_first - of.SINKS, 0), tl.where(m_u, tl.maximum(b_size, 0), 0)
    else:
        p_offsets = tl.load(p_row + 6).to(tl.pointer_type(tl.int32)) + i_kv * tl.load(p_row + 7)
        b_first = tl.load(p_offsets + o_u, mask=m_u, other=0)
        return b_first, tl.load(p_offsets + o_u + 1, mask=m_u, other=0) - b_first


@triton.jit
def reps_of(of, i_b, i_kv, o_u, m_u, LENGTH: tl.constexpr):
    """Pointers `[R, 1]` to the representations, of LENGTH numbers, of units o_u of one KV head."""
    if of.PAGE:
        PAGES: tl.constexpr = of.BLOCK // of.PAGE
        b_block = tl.load(of.table + i_b.to(tl.int64) * of.TABLE + o_u // PAGES, mask=m_u, other=0).to(tl.int64)
        o_rep = b_block * of.STRIDE + (i_kv * PAGES + o_u % PAGES) * LENGTH
        if LENGTH % 8 == 0:
            o_rep = tl.multiple_of(o_rep, 8)  # lets the compiler read 16 bytes at a time
        return of.reps + o_rep[:, None]
    else:
        p_row = of.plan + i_b * of.FIELDS
        p_reps = tl.load(p_row + 2).to(tl.pointer_type(of.reps.dtype.element_ty)) + i_kv * tl.load(p_row + 3)
        p_rows = tl.multiple_of(p_reps, 16)  # lets the compiler read 16 bytes at a time
        return p_rows + o_u.to(tl.int64)[:, None] * LENGTH


@triton.jit
def scores_of(of, i_b, i_kv, i_bh, units, LANES: tl.constexpr):
    """Scores fp32 `[LANES, width]` of one KV head, and their width."""
    width = tl.multiple_of(tl.cdiv(units, _STEP) * _STEP, _STEP)
    if of.PAGE:
        return of.scores + i_bh.to(tl.int64) * LANES * of.WIDTH, width
    else:
        p_scores = tl.load(of.plan + i_b * of.FIELDS + 9).to(tl.pointer_type(tl.float32))
        return tl.multiple_of(p_scores, 16) + i_kv.to(tl.int64) * LANES * width, width


@triton.jit
def members_of(of, i_b, i_kv, b_place, m_place):
    """Token ids of members b_place of one KV head, else -1."""
    if of.PAGE:
        return tl.where(m_place, b_place + of.SINKS, -1)
    else:
        p_row = of.plan + i_b * of.FIELDS
        p_members = tl.load(p_row + 4).to(tl.pointer_type(tl.int32)) + i_kv * tl.load(p_row + 5)
        return tl.load(p_members + b_place, mask=m_place, other=-1)


@triton.jit
def dot_scores(p_queries, p_reps, m_u, D: tl.constexpr, BD: tl.constexpr, LANES: tl.constexpr, BL: tl.constexpr,
               WIDTH: tl.constexpr):  # fmt: skip
    """Scores `[R, BL]` by tensor cores: representations at p_reps `[R, 1]` of WIDTH = D or 2 D numbers, queries
    `[LANES, D]`."""
    o_d, o_l = tl.arange(0, BD), tl.arange(0, BL)
    m_d = o_d < D
    b_q = tl.load(p_queries + o_l[None, :] * D + o_d[:, None], mask=m_d[:, None] & (o_l < LANES)[None, :], other=0.0)
    m_rep = m_u[:, None] & m_d[None, :]
    b_rep = tl.load(p_reps + o_d[None, :], mask=m_rep, other=0.0)  # [R, BD]
    if WIDTH == D:
        return tl.dot(b_rep, b_q)
    b_zero = tl.zeros_like(b_q)
    b_low = tl.load(p_reps + D + o_d[None, :], mask=m_rep, other=0.0)
    return tl.dot(b_low, tl.where(b_q < 0, b_q, b_zero), tl.dot(b_rep, tl.where(b_q > 0, b_q, b_zero)))


@triton.jit
def sum_scores(p_queries, p_reps, m_u, R: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, G: tl.constexpr,
               LANES: tl.constexpr, BL: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """As `dot_scores`, in fp32 for any dtypes. A single lane for several queries takes their mean."""
    o_d, o_l = tl.arange(0, BD), tl.arange(0, BL)
    m_d = o_d < D
    m_rep = m_u[:, None] & m_d[None, :]
    b_rep = tl.load(p_reps + o_d[None, :], mask=m_rep, other=0.0).to(tl.float32)
    if WIDTH != D:
        b_low = tl.load(p_reps + D + o_d[None, :], mask=m_rep, other=0.0).to(tl.float32)
    b_s = tl.zeros([R, BL], tl.float32)
    for lane in tl.static_range(LANES):
        b_q = tl.load(p_queries + lane * D + o_d, mask=m_d, other=0.0).to(tl.float32)
        if LANES < G:
            for g in tl.static_range(1, G):
                b_q += tl.load(p_queries + g * D + o_d, mask=m_d, other=0.0).to(tl.float32)
            b_q = b_q / G
        if WIDTH == D:
            b_one = tl.sum(b_rep * b_q[None, :], 1)
        else:
            b_one = tl.sum(b_rep * tl.maximum(b_q, 0.0)[None, :] + b_low * tl.minimum(b_q, 0.0)[None, :], 1)
        b_s = tl.where((o_l == lane)[None, :], b_one[:, None], b_s)
    return b_s


@triton.jit
def score_kernel(
    p_queries, of, p_fire, p_peak, p_mass, scaling, HEADS, PARTS,
    D: tl.constexpr, BD: tl.constexpr, G: tl.constexpr, LANES: tl.constexpr, BL: tl.constexpr, R: tl.constexpr,
    WIDTH: tl.constexpr, DOT: tl.constexpr, LARGEST: tl.constexpr, SOFTMAX: tl.constexpr, SIZED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (R units, sequence and KV head): scores fp32 of queries `[bh, G, D]`, see `scores_of`; empty units -inf.

    of: a `UnitSource`. LARGEST: stores only the group's largest score, in lane 0. SOFTMAX:
    also stores peak and mass `[bh, lane, PARTS]` of each lane's softmax over these units. SIZED: adds log(tokens) to logits.
    """
    i_part, i_bh = tl.program_id(0), tl.program_id(1)
    i_b, i_kv = i_bh // HEADS, i_bh % HEADS
    begin(PDL)
    # The row is read at once, and representations of empty units too, so that fewer reads wait for others.
    fire = tl.load(p_fire + i_b)
    units, _, _ = unit_counts(of, i_b)
    p_scores, width = scores_of(of, i_b, i_kv, i_bh, units, 1 if LARGEST else LANES)
    o_u, o_l = i_part * R + tl.arange(0, R), tl.arange(0, BL)
    m_real = (o_u < units) & (fire != 0)
    _, b_size = unit_sizes(of, i_b, i_kv, o_u, m_real)
    p_rows = reps_of(of, i_b, i_kv, o_u, m_real, WIDTH)
    if (fire != 0) & (i_part * R < units):
        m_u = b_size > 0
        p_own = p_queries + i_bh.to(tl.int64) * (G * D)
        if DOT:
            b_s = dot_scores(p_own, p_rows, m_real, D, BD, LANES, BL, WIDTH)
        else:
            b_s = sum_scores(p_own, p_rows, m_real, R, D, BD, G, LANES, BL, WIDTH)
        if SIZED:
            b_s += (tl.log(tl.maximum(b_size, 1).to(tl.float32)) / scaling)[:, None]
        m_l = o_l < LANES
        b_s = tl.where(m_u[:, None] & m_l[None, :], b_s, float("-inf"))
        if LARGEST:
            tl.store(p_scores + o_u, tl.max(b_s, 1), mask=m_real)
        else:
            p_lanes = p_scores + o_l[None, :] * width
            tl.store(p_lanes + o_u[:, None], b_s, mask=m_real[:, None] & m_l[None, :])
        if SOFTMAX:
            b_x = b_s * scaling
            b_peak = tl.max(b_x, 0)
            b_base = tl.where(b_peak == float("-inf"), 0.0, b_peak)
            o_part = (i_bh * LANES + o_l) * PARTS + i_part
            tl.store(p_peak + o_part, b_peak, mask=m_l)
            tl.store(p_mass + o_part, tl.sum(tl.exp(b_x - b_base[None, :]), 0), mask=m_l)
    end(PDL)


@triton.jit
def add_six(a_1, a_2, a_3, a_4, a_5, a_6, b_1, b_2, b_3, b_4, b_5, b_6):
    """Sums of three sizes and three counts in one reduction."""
    return a_1 + b_1, a_2 + b_2, a_3 + b_3, a_4 + b_4, a_5 + b_5, a_6 + b_6


@triton.jit
def join_four(a_1, a_2, a_3, a_4, b_1, b_2, b_3, b_4):
    """Least and greatest key, tokens and units in one reduction."""
    return tl.minimum(a_1, b_1), tl.maximum(a_2, b_2), a_3 + b_3, a_4 + b_4


@triton.jit
def extremes(b_low, b_high, b_size, b_count, ALONE: tl.constexpr):
    """(least of b_low, greatest of b_high, sums of b_size and b_count). ALONE: the program is one warp, which reduces single
    numbers by one instruction; several warps exchange all four at once."""
    if ALONE:
        return tl.min(b_low, 0), tl.max(b_high, 0), tl.sum(b_size, 0), tl.sum(b_count, 0)
    return tl.reduce((b_low, b_high, b_size, b_count), 0, join_four)


@triton.jit
def six_sums(b_1, b_2, b_3, b_4, b_5, b_6, ALONE: tl.constexpr):
    """Six sums, see `extremes`."""
    if ALONE:
        return tl.sum(b_1, 0), tl.sum(b_2, 0), tl.sum(b_3, 0), tl.sum(b_4, 0), tl.sum(b_5, 0), tl.sum(b_6, 0)
    return tl.reduce((b_1, b_2, b_3, b_4, b_5, b_6), 0, add_six)


@triton.jit
def reaching(b_key, b_size, low, high, step):
    """Per unit: its tokens if its key reaches low + step, low + 2 step and low + 3 step, else 0; then 1 or 0 likewise. Keys
    above `high` reach all of them, also where these lie beyond the end of a range of few values. Ignored units have size 0."""
    most = tl.minimum(high.to(tl.int64) + 1, _HIGHEST)
    m_u = b_size > 0
    m_1 = m_u & (b_key >= tl.minimum(low + step, most).to(tl.int32))
    m_2 = m_u & (b_key >= tl.minimum(low + 2 * step, most).to(tl.int32))
    m_3 = m_u & (b_key >= tl.minimum(low + 3 * step, most).to(tl.int32))
    return (tl.where(m_1, b_size, 0), tl.where(m_2, b_size, 0), tl.where(m_3, b_size, 0),
            m_1.to(tl.int32), m_2.to(tl.int32), m_3.to(tl.int32))  # fmt: skip


@triton.jit
def quarter_of(quarter, n_0, n_1, n_2, n_3):
    """n_0 .. n_3 by number."""
    return tl.where(quarter == 3, n_3, tl.where(quarter == 2, n_2, tl.where(quarter == 1, n_1, n_0)))


@triton.jit
def narrowed(low, high, step, wanted, total, over, inside, above, n_1, n_2, n_3, u_1, u_2, u_3):
    """The quarter of [low, high] in which `wanted` tokens are reached: (low, high, tokens from low on, tokens above high, units
    inside, units above). n, u: tokens and units from low + step, low + 2 step and low + 3 step on."""
    quarter = (n_1 >= wanted).to(tl.int32) + (n_2 >= wanted).to(tl.int32) + (n_3 >= wanted).to(tl.int32)
    reached = quarter_of(quarter, inside + above, u_1, u_2, u_3)
    total = quarter_of(quarter, total, n_1, n_2, n_3)
    over = quarter_of(quarter, n_1, n_2, n_3, over)
    above = quarter_of(quarter, u_1, u_2, u_3, above)
    low = (low + quarter * step).to(tl.int32)
    return low, tl.minimum(high.to(tl.int64), low + step - 1).to(tl.int32), total, over, reached - above, above


@triton.jit
def fill_kernel(
    p_peak, p_mass, of, p_fire, p_keys, p_firsts, p_sizes, p_kept, scaling, BUDGET, HEADS, LENGTH, PARTS,
    LANES: tl.constexpr, SOFTMAX: tl.constexpr, MEAN: tl.constexpr, BT: tl.constexpr, R: tl.constexpr, AT_ONCE: tl.constexpr,
    BC: tl.constexpr, CHUNKS: tl.constexpr, SLOTS: tl.constexpr, ENOUGH: tl.constexpr, ORDERED: tl.constexpr,
    ALONE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (chunk of LENGTH <= BC units, sequence and KV head): keeps the units that would fill BUDGET, or what the plan
    allows, if there were no other chunk; or up to ENOUGH <= SLOTS units among which these are.

    Units are ranked by the softmax shares of their scores (peak, mass: see `score_kernel`, for parts of R units; AT_ONCE: see
    `shares`), or by the largest of LANES scores. Writes keys, first members and sizes of the kept units, `[bh, CHUNKS, SLOTS]`
    if ORDERED, else `[bh, SLOTS, CHUNKS]`, in which the first rows are full; and how many to kept `[bh, CHUNKS]`.
    """
    i_chunk, i_bh = tl.program_id(0), tl.program_id(1)
    i_b, i_kv = i_bh // HEADS, i_bh % HEADS
    fire = tl.load(p_fire + i_b)
    units, tokens, most = unit_counts(of, i_b)
    units, wanted = units.to(tl.int32), tl.minimum(tl.minimum(tokens, BUDGET), most)
    o_i = tl.arange(0, BC)
    o_c = i_chunk * LENGTH + o_i
    m_c = (o_i < LENGTH) & (o_c < units)
    b_first, b_size = unit_sizes(of, i_b, i_kv, o_c, m_c & (fire != 0))
    p_own, width = scores_of(of, i_b, i_kv, i_bh, units, LANES)
    begin(PDL)  # the scores; all that was read so far is older
    if fire != 0:
        m_w = (o_i < LENGTH) & (o_c < width)  # whole vectors
        if SOFTMAX:
            o_lse = i_bh * LANES * PARTS
            b_s = shares(p_own, p_peak + o_lse, p_mass + o_lse, tl.cdiv(units, R), o_c, m_w, scaling, width, PARTS,
                         LANES, MEAN, BT, AT_ONCE)  # fmt: skip
        else:
            b_s = tl.load(p_own + o_c, mask=m_w, other=0.0)
            for lane in tl.static_range(1, LANES):
                b_s = tl.maximum(b_s, tl.load(p_own + lane * width + o_c, mask=m_w, other=0.0))
        m_u = b_size > 0
        b_key = tl.where(m_u, ordered(b_s), LOWEST)
        low, high, total, inside = extremes(tl.where(m_u, b_key, _HIGHEST), b_key, b_size, m_u.to(tl.int32), ALONE)
        over, above = 0, 0  # tokens and units above the range
        while (high > low) & (inside > 1) & (total > wanted) & (inside + above > ENOUGH):
            step = (high.to(tl.int64) - low.to(tl.int64)) // 4 + 1
            b_1, b_2, b_3, b_4, b_5, b_6 = reaching(b_key, b_size, low, high, step)
            n_1, n_2, n_3, u_1, u_2, u_3 = six_sums(b_1, b_2, b_3, b_4, b_5, b_6, ALONE)
            low, high, total, over, inside, above = narrowed(low, high, step, wanted, total, over, inside, above, n_1, n_2, n_3,
                                                             u_1, u_2, u_3)  # fmt: skip
        m_keep = m_u & (b_key >= low)
        count = inside + above
        if count > SLOTS:  # units of one score: the first ones
            b_edge = tl.where(m_keep & (b_key <= high), b_size, 0)
            m_keep = m_keep & ((b_edge == 0) | (tl.cumsum(b_edge, 0) - b_edge < wanted - over))
            count = tl.sum(m_keep.to(tl.int32), 0)
        b_keep = m_keep.to(tl.int32)
        o_out = tl.cumsum(b_keep, 0) - b_keep
        o_out = i_chunk * SLOTS + o_out if ORDERED else o_out * CHUNKS + i_chunk
        o_out += i_bh.to(tl.int64) * (CHUNKS * SLOTS)
        tl.store(p_keys + o_out, b_key, mask=m_keep)
        tl.store(p_firsts + o_out, b_first, mask=m_keep)
        tl.store(p_sizes + o_out, b_size, mask=m_keep)
        tl.store(p_kept + i_bh * CHUNKS + i_chunk, count)
    end(PDL)


@triton.jit
def candidates(p_keys, p_firsts, p_sizes, p_kept, o_m, CHUNKS: tl.constexpr, SLOTS: tl.constexpr, ORDERED: tl.constexpr):
    """Keys, first members and sizes of the candidates in places o_m of a KV head; places that hold none have size 0."""
    i_chunk = o_m // SLOTS if ORDERED else o_m % CHUNKS
    i_slot = o_m % SLOTS if ORDERED else o_m // CHUNKS
    m_m = i_slot < tl.load(p_kept + i_chunk, mask=i_chunk < CHUNKS, other=0)
    return (tl.load(p_keys + o_m, mask=m_m, other=LOWEST), tl.load(p_firsts + o_m, mask=m_m, other=0),
            tl.load(p_sizes + o_m, mask=m_m, other=0))  # fmt: skip


@triton.jit
def ranked(b_key, b_first, b_size, score, TIES: tl.constexpr):
    """Keys and sizes of a search: as they are, or (TIES) of units of one score, the first member highest."""
    if TIES:
        return -b_first, tl.where(b_key == score, b_size, 0)
    return b_key, b_size


@triton.jit
def budget_range(
    p_keys, p_firsts, p_sizes, p_kept, b_key, b_first, b_size, places, wanted, score,
    TIES: tl.constexpr, M: tl.constexpr, CHUNKS: tl.constexpr, SLOTS: tl.constexpr, ORDERED: tl.constexpr,
):  # fmt: skip
    """(low, high, tokens above high, units inside, tokens from low on): candidates above `high` fit into `wanted` tokens, and
    [low, high] has one, or candidates of one score, or only such that fit. The first M places are given (b_key, b_first,
    b_size), the others up to `places` are read again in every round. score, TIES: see `ranked`.

    Without other places there is no loop over them: Triton 3.6 fails to compile a loop that it finds never runs."""
    b_rank, b_own = ranked(b_key, b_first, b_size, score, TIES)
    m_own = b_own > 0
    b_low, b_high = tl.where(m_own, b_rank, _HIGHEST), tl.where(m_own, b_rank, LOWEST)
    b_total, b_count = b_own, m_own.to(tl.int32)
    if M < CHUNKS * SLOTS:
        i = M
        while i < places:
            b_k, b_f, b_s = candidates(p_keys, p_firsts, p_sizes, p_kept, i + tl.arange(0, M), CHUNKS, SLOTS, ORDERED)
            b_k, b_s = ranked(b_k, b_f, b_s, score, TIES)
            b_low = tl.minimum(b_low, tl.where(b_s > 0, b_k, _HIGHEST))
            b_high = tl.maximum(b_high, tl.where(b_s > 0, b_k, LOWEST))
            b_total += b_s
            b_count += (b_s > 0).to(tl.int32)
            i += M
    low, high, total, inside = extremes(b_low, b_high, b_total, b_count, False)
    over, above = 0, 0
    while (high > low) & (inside > 1) & (total > wanted):
        step = (high.to(tl.int64) - low.to(tl.int64)) // 4 + 1
        b_1, b_2, b_3, b_4, b_5, b_6 = reaching(b_rank, b_own, low, high, step)
        if M < CHUNKS * SLOTS:
            i = M
            while i < places:
                b_k, b_f, b_s = candidates(p_keys, p_firsts, p_sizes, p_kept, i + tl.arange(0, M), CHUNKS, SLOTS, ORDERED)
                b_k, b_s = ranked(b_k, b_f, b_s, score, TIES)
                c_1, c_2, c_3, c_4, c_5, c_6 = reaching(b_k, b_s, low, high, step)
                b_1, b_2, b_3, b_4, b_5, b_6 = b_1 + c_1, b_2 + c_2, b_3 + c_3, b_4 + c_4, b_5 + c_5, b_6 + c_6
                i += M
        n_1, n_2, n_3, u_1, u_2, u_3 = six_sums(b_1, b_2, b_3, b_4, b_5, b_6, False)
        low, high, total, over, inside, above = narrowed(low, high, step, wanted, total, over, inside, above, n_1, n_2, n_3,
                                                         u_1, u_2, u_3)  # fmt: skip
    return low, high, over, inside, total


@triton.jit
def taken_of(b_key, b_first, b_size, low, high, first, last, left):
    """Tokens taken of each candidate: all of those above `high`; of those in [low, high] all of the ones before member `first`,
    at most `left` of the ones in [first, last], and none of the rest."""
    b_edge = tl.where(b_first < first, b_size, tl.where(b_first <= last, tl.minimum(b_size, left), 0))
    return tl.where(b_key > high, b_size, tl.where(b_key >= low, b_edge, 0))


@triton.jit
def places_of(b_first, b_take, o_t, before):
    """Places in members, less its number, of each token o_t that lies in one of these candidates, else 0. before: tokens taken
    of the candidates in front of them."""
    b_start = before + tl.cumsum(b_take, 0) - b_take
    b_in = o_t[:, None] - b_start[None, :]
    m_in = b_in.to(tl.uint32, bitcast=True) < b_take.to(tl.uint32, bitcast=True)[None, :]
    return tl.sum(tl.where(m_in, (b_first - b_start)[None, :], 0), 1)


@triton.jit
def expand_kernel(
    of, p_fire, p_keys, p_firsts, p_sizes, p_kept, p_counts, p_out, BUDGET, HEADS, K,
    T: tl.constexpr, M: tl.constexpr, BC: tl.constexpr, CHUNKS: tl.constexpr, SLOTS: tl.constexpr, ORDERED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (T tokens, sequence and KV head): out int32 `[bh, K]`, the members of the best units, then -1; counts `[bh]`.

    Every program of a KV head finds the same units among what `fill_kernel` has kept. ORDERED: the order of ids is that of the
    units, which lie in ascending order; else any, but always the same one.
    """
    i_part, i_bh = tl.program_id(0), tl.program_id(1)
    i_b, i_kv = i_bh // HEADS, i_bh % HEADS
    fire = tl.load(p_fire + i_b)
    counts = unit_counts(of, i_b)
    wanted = tl.minimum(tl.minimum(counts[1], BUDGET), counts[2])
    begin(PDL)
    if fire != 0:
        o_own = i_bh.to(tl.int64) * (CHUNKS * SLOTS)
        p_keys, p_firsts, p_sizes, p_kept = p_keys + o_own, p_firsts + o_own, p_sizes + o_own, p_kept + i_bh * CHUNKS
        places = CHUNKS * SLOTS
        if not ORDERED:
            o_c = tl.arange(0, BC)
            places = CHUNKS * tl.max(tl.load(p_kept + o_c, mask=o_c < CHUNKS, other=0), 0)
        o_m, o_t = tl.arange(0, M), i_part * T + tl.arange(0, T)
        b_key, b_first, b_size = candidates(p_keys, p_firsts, p_sizes, p_kept, o_m, CHUNKS, SLOTS, ORDERED)
        low, high, over, inside, total = budget_range(p_keys, p_firsts, p_sizes, p_kept, b_key, b_first, b_size, places, wanted,
                                                      0, False, M, CHUNKS, SLOTS, ORDERED)  # fmt: skip
        here, first, last = tl.minimum(total, wanted), 0, _HIGHEST
        if (inside > 1) & (total > wanted):  # of units of one score those with the first members
            lowest, highest, more, _, _ = budget_range(p_keys, p_firsts, p_sizes, p_kept, b_key, b_first, b_size, places,
                                                       wanted - over, low, True, M, CHUNKS, SLOTS, ORDERED)  # fmt: skip
            first, last, over = -highest, -lowest, over + more
        b_take = taken_of(b_key, b_first, b_size, low, high, first, last, here - over)
        b_place = o_t + places_of(b_first, b_take, o_t, 0)
        before = tl.sum(b_take, 0)
        if M < CHUNKS * SLOTS:
            i = M
            while i < places:
                b_k, b_f, b_s = candidates(p_keys, p_firsts, p_sizes, p_kept, i + o_m, CHUNKS, SLOTS, ORDERED)
                b_take = taken_of(b_k, b_f, b_s, low, high, first, last, here - over)
                b_place += places_of(b_f, b_take, o_t, before)
                before += tl.sum(b_take, 0)
                i += M
        b_id = members_of(of, i_b, i_kv, b_place, o_t < here)
        tl.store(p_out + i_bh.to(tl.int64) * K + o_t, b_id, mask=o_t < K)
        if i_part == 0:
            tl.store(p_counts + i_bh, here)
    end(PDL)


@triton.jit
def ascend_kernel(p_fire, p_counts, p_in, p_out, HEADS, K, T: tl.constexpr, BS: tl.constexpr, PDL: tl.constexpr):
    """Program (T ids, sequence and KV head): sorts the distinct ids of in `[bh, K]` into out `[bh, K]`; then -1.

    The place of an id is the number of smaller ids: K^2 comparisons over all programs take less time than a sort.
    """
    i_part, i_bh = tl.program_id(0), tl.program_id(1)
    fire = tl.load(p_fire + i_bh // HEADS)
    begin(PDL)
    if fire != 0:
        count = tl.load(p_counts + i_bh)
        p_own, o_t = p_in + i_bh.to(tl.int64) * K, i_part * T + tl.arange(0, T)
        m_t = o_t < count
        b_id = tl.load(p_own + o_t, mask=m_t, other=-1)
        b_rank = tl.zeros([T], tl.int32)
        i_s = 0
        while i_s < count:
            o_s = i_s + tl.arange(0, BS)
            b_other = tl.load(p_own + o_s, mask=o_s < count, other=0x7FFFFFFF)
            b_rank += tl.sum((b_other[None, :] < b_id[:, None]).to(tl.int32), 1)
            i_s += BS
        p_row = p_out + i_bh.to(tl.int64) * K
        tl.store(p_row + tl.where(m_t, b_rank, o_t), b_id, mask=o_t < K)
    end(PDL)

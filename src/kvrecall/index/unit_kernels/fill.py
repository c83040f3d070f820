"""The best units that fill a budget counted in tokens, and their token ids, without sorting and without the host.

The kernel narrows the range of scores in which the budget is reached, to a quarter per round, by adding up sizes. It ends with
one unit, or units of one score; these are taken from the lowest position on, and the last one is cut. Many units are split into
chunks first; each chunk keeps what would fill the budget alone. The result does not depend on timing.
`select.kernels.top_kernel` does the same with counts of ids instead of sizes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvrecall.index.unit_kernels.score import scores_of, unit_sizes
from kvrecall.select.kernels import LOWEST, lse_of, ordered, shares


@triton.jit
def add_six(a_1, a_2, a_3, a_4, a_5, a_6, b_1, b_2, b_3, b_4, b_5, b_6):
    """Sums of three sizes and three counts in one reduction."""
    return a_1 + b_1, a_2 + b_2, a_3 + b_3, a_4 + b_4, a_5 + b_5, a_6 + b_6


@triton.jit
def sizes_from(b_key, b_size, low, step):
    """Tokens, then units, with keys of at least low + step, low + 2 step and low + 3 step. Ignored units have the key
    LOWEST."""
    most = tl.full([], 0x7FFFFFFF, tl.int64)
    m_1 = b_key >= tl.minimum(low + step, most).to(tl.int32)
    m_2 = b_key >= tl.minimum(low + 2 * step, most).to(tl.int32)
    m_3 = b_key >= tl.minimum(low + 3 * step, most).to(tl.int32)
    return tl.reduce((tl.where(m_1, b_size, 0), tl.where(m_2, b_size, 0), tl.where(m_3, b_size, 0),
                      m_1.to(tl.int32), m_2.to(tl.int32), m_3.to(tl.int32)), 0, add_six)  # fmt: skip


@triton.jit
def quarter_of(quarter, n_0, n_1, n_2, n_3):
    """n_0 .. n_3 by number."""
    return tl.where(quarter == 3, n_3, tl.where(quarter == 2, n_2, tl.where(quarter == 1, n_1, n_0)))


@triton.jit
def budget_range(b_key, b_size, m_u, wanted, total):
    """(low, high, tokens above high): units above `high` fit into `wanted` of the `total` tokens. [low, high] has one unit,
    or units of one score, or only units that fit."""
    low = tl.min(tl.where(m_u, b_key, 0x7FFFFFFF), 0)
    high = tl.max(tl.where(m_u, b_key, LOWEST), 0)
    inside = tl.sum(m_u.to(tl.int32), 0)  # units in the range
    above, over = 0, 0  # units and tokens above it
    while (high > low) & (inside > 1) & (total > wanted):
        step = (high.to(tl.int64) - low.to(tl.int64)) // 4 + 1
        n_1, n_2, n_3, u_1, u_2, u_3 = sizes_from(b_key, b_size, low, step)
        quarter = (n_1 >= wanted).to(tl.int32) + (n_2 >= wanted).to(tl.int32) + (n_3 >= wanted).to(tl.int32)
        reached = quarter_of(quarter, inside + above, u_1, u_2, u_3)
        total = quarter_of(quarter, total, n_1, n_2, n_3)
        over = quarter_of(quarter, n_1, n_2, n_3, over)
        above = quarter_of(quarter, u_1, u_2, u_3, above)
        inside = reached - above
        low = (low + quarter * step).to(tl.int32)
        high = tl.minimum(high.to(tl.int64), low + step - 1).to(tl.int32)
    return low, high, over


@triton.jit
def fill_kernel(
    p_peak, p_mass, p_plan, p_fire, p_units, p_keys, p_kept, p_firsts, p_starts, p_counts, scaling, BUDGET, HEADS, CHUNKS,
    PARTS, SLOTS,
    LANES: tl.constexpr, SOFTMAX: tl.constexpr, MEAN: tl.constexpr, BL: tl.constexpr, BT: tl.constexpr, R: tl.constexpr,
    BC: tl.constexpr, LAST: tl.constexpr, CHUNKED: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    """Program (BC of the units, sequence and KV head): the best of its units that fill BUDGET, or what the plan allows.

    First level: scores of LANES lanes, ranked by their softmax shares (peak, mass: see `score_kernel`, for parts of R units)
    or by the largest lane. Writes unit numbers, ascending, and keys `[bh, CHUNKS, SLOTS]`, and how many to kept
    `[bh, CHUNKS + 1]`. LAST level: one program, CHUNKED if it reads what the first level left, else scores. Writes, per unit
    taken, its first member and the place of its first token in the result, `[bh, SLOTS]`; the number of units to
    kept[bh, CHUNKS]; the number of tokens to counts[bh].
    """
    i_chunk, i_bh = tl.program_id(0), tl.program_id(1)
    i_b, i_kv = i_bh // HEADS, i_bh % HEADS
    if tl.load(p_fire + i_b) != 0:
        p_row = p_plan + i_b * FIELDS
        units, wanted = tl.load(p_row).to(tl.int32), tl.minimum(tl.load(p_row + 1).to(tl.int32), BUDGET)
        wanted = tl.minimum(wanted, tl.load(p_row + 8).to(tl.int32))
        o_c = i_chunk * BC + tl.arange(0, BC)
        o_left = i_bh.to(tl.int64) * CHUNKS * SLOTS
        if CHUNKED:
            i_from = o_c // SLOTS
            b_kept = tl.load(p_kept + i_bh * (CHUNKS + 1) + i_from, mask=i_from < CHUNKS, other=0)
            m_c = o_c - i_from * SLOTS < b_kept
            b_unit = tl.load(p_units + o_left + o_c, mask=m_c, other=0)
            b_key = tl.load(p_keys + o_left + o_c, mask=m_c, other=LOWEST)
        else:
            m_c = o_c < units
            b_unit = o_c
            p_own, width = scores_of(p_row, i_kv, units, LANES)
            if SOFTMAX:
                o_lse = i_bh * LANES * PARTS
                b_lse = lse_of(p_peak + o_lse, p_mass + o_lse, tl.cdiv(units, R), PARTS, LANES, BL, BT)
                b_s = shares(p_own, b_lse, o_c, m_c, scaling, width, LANES, BL, MEAN)
            else:
                b_s = tl.load(p_own + o_c, mask=m_c, other=0.0)
                for lane in tl.static_range(1, LANES):
                    b_s = tl.maximum(b_s, tl.load(p_own + lane * width + o_c, mask=m_c, other=0.0))
            b_key = ordered(b_s)
        b_first, b_size = unit_sizes(p_row, i_kv, b_unit, m_c)
        m_u = b_size > 0
        b_key = tl.where(m_u, b_key, LOWEST)
        total = tl.sum(b_size, 0)
        here = tl.minimum(total, wanted)
        low, high, over = budget_range(b_key, b_size, m_u, here, total)
        m_edge = m_u & (b_key >= low) & (b_key <= high)
        b_edge = tl.where(m_edge, b_size, 0)
        b_room = tl.where(m_edge, here - over - (tl.cumsum(b_edge, 0) - b_edge), b_size)
        b_take = tl.where(m_u & (b_key >= low), tl.minimum(b_size, tl.maximum(b_room, 0)), 0)
        m_keep = b_take > 0
        b_keep = m_keep.to(tl.int32)
        o_out = tl.cumsum(b_keep, 0) - b_keep
        m_keep = m_keep & (o_out < SLOTS)
        if LAST:
            o_taken = i_bh.to(tl.int64) * SLOTS + o_out
            tl.store(p_firsts + o_taken, b_first, mask=m_keep)
            tl.store(p_starts + o_taken, tl.cumsum(b_take, 0) - b_take, mask=m_keep)
            tl.store(p_kept + i_bh * (CHUNKS + 1) + CHUNKS, tl.sum(b_keep, 0))
            tl.store(p_counts + i_bh, here)
        else:
            o_row = o_left + i_chunk * SLOTS + o_out
            tl.store(p_units + o_row, b_unit, mask=m_keep)
            tl.store(p_keys + o_row, b_key, mask=m_keep)
            tl.store(p_kept + i_bh * (CHUNKS + 1) + i_chunk, tl.sum(b_keep, 0))


@triton.jit
def expand_kernel(
    p_plan, p_fire, p_kept, p_firsts, p_starts, p_counts, p_out, HEADS, CHUNKS, SLOTS, K,
    T: tl.constexpr, BS: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    """Program (T tokens, sequence and KV head): out int32 `[bh, K]`, the members of the selected units in order, then -1."""
    i_part, i_bh = tl.program_id(0), tl.program_id(1)
    i_b, i_kv = i_bh // HEADS, i_bh % HEADS
    if tl.load(p_fire + i_b) != 0:
        p_row = p_plan + i_b * FIELDS
        taken, count = tl.load(p_kept + i_bh * (CHUNKS + 1) + CHUNKS), tl.load(p_counts + i_bh)
        p_first, p_start = p_firsts + i_bh.to(tl.int64) * SLOTS, p_starts + i_bh.to(tl.int64) * SLOTS
        o_t = i_part * T + tl.arange(0, T)
        m_t = o_t < count
        b_unit = tl.full([T], -1, tl.int32)
        i_s = 0
        while i_s < taken:  # a token belongs to the last unit that starts at or before it
            o_s = i_s + tl.arange(0, BS)
            b_start = tl.load(p_start + o_s, mask=o_s < taken, other=0x7FFFFFFF)
            b_unit += tl.sum((b_start[None, :] <= o_t[:, None]).to(tl.int32), 1)
            i_s += BS
        b_place = tl.load(p_first + b_unit, mask=m_t, other=0) + o_t - tl.load(p_start + b_unit, mask=m_t, other=0)
        p_members = tl.load(p_row + 4).to(tl.pointer_type(tl.int32)) + i_kv * tl.load(p_row + 5)
        b_id = tl.load(p_members + b_place, mask=m_t, other=-1)
        tl.store(p_out + i_bh.to(tl.int64) * K + o_t, b_id, mask=o_t < K)


@triton.jit
def ascend_kernel(p_fire, p_counts, p_in, p_out, HEADS, K, T: tl.constexpr, BS: tl.constexpr):
    """Program (T ids, sequence and KV head): sorts the distinct ids of in `[bh, K]` into out `[bh, K]`; then -1.

    The place of an id is the number of smaller ids: K^2 comparisons over all programs take less time than a sort.
    """
    i_part, i_bh = tl.program_id(0), tl.program_id(1)
    if tl.load(p_fire + i_bh // HEADS) != 0:
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

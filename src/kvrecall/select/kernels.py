"""The k best of many scored ids, ascending, without sorting: a search for the k-th score in a range that shrinks to a quarter.

Many ids are cut into chunks, each of which keeps its own k best, in parallel; the program that ends last searches what they
leave once more. The scores of a group are first made one: the mean or the largest share of a softmax, whose sums come with
the scores. Bytes: lanes x 4 per candidate.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvrecall.core.pdl import begin, end

LOWEST = tl.constexpr(-0x80000000)


@triton.jit
def ordered(b_score):
    """int32 that orders like the fp32 scores do (both zeros alike)."""
    b_bits = (b_score + 0.0).to(tl.int32, bitcast=True)
    return b_bits ^ ((b_bits >> 31) & 0x7FFFFFFF)


@triton.jit
def lse_of(p_peak, p_mass, parts, PARTS, LANES: tl.constexpr, BL: tl.constexpr, BT: tl.constexpr):
    """Logarithm of the sum of exponentials over all candidates, per lane `[BL]`, from its parts."""
    o_t, o_l = tl.arange(0, BT), tl.arange(0, BL)
    m_part = (o_l < LANES)[:, None] & (o_t < parts)[None, :]
    o_part = o_l[:, None] * PARTS + o_t[None, :]
    b_peak = tl.load(p_peak + o_part, mask=m_part, other=float("-inf"))
    b_mass = tl.load(p_mass + o_part, mask=m_part, other=0.0)
    b_high = tl.max(b_peak, 1)
    b_high = tl.where(b_high == float("-inf"), 0.0, b_high)
    return b_high + tl.log(tl.maximum(tl.sum(b_mass * tl.exp(b_peak - b_high[:, None]), 1), 1e-30))


@triton.jit
def shares(p_estimates, b_lse, o_c, m_c, scaling, ROOM, LANES: tl.constexpr, BL: tl.constexpr, MEAN: tl.constexpr):
    """Sum over the lanes of the softmax shares of candidates `o_c`; or the logarithm of the largest."""
    b_all = tl.full(o_c.shape, 0.0 if MEAN else float("-inf"), tl.float32)
    for lane in tl.static_range(LANES):
        lse = tl.sum(tl.where(tl.arange(0, BL) == lane, b_lse, 0.0), 0)
        b_share = tl.load(p_estimates + lane * ROOM + o_c, mask=m_c, other=float("-inf")) * scaling - lse
        b_all = b_all + tl.exp(b_share) if MEAN else tl.maximum(b_all, b_share)
    return b_all


@triton.jit
def add_three(a_1, a_2, a_3, b_1, b_2, b_3):
    """Sums of three counts in one reduction."""
    return a_1 + b_1, a_2 + b_2, a_3 + b_3


@triton.jit
def counts_from(b_key, low, step):
    """How many keys reach low + step, low + 2 step and low + 3 step."""
    most = tl.full([], 0x7FFFFFFF, tl.int64)
    b_1 = (b_key >= tl.minimum(low + step, most).to(tl.int32)).to(tl.int32)
    b_2 = (b_key >= tl.minimum(low + 2 * step, most).to(tl.int32)).to(tl.int32)
    b_3 = (b_key >= tl.minimum(low + 3 * step, most).to(tl.int32)).to(tl.int32)
    return tl.reduce((b_1, b_2, b_3), 0, add_three)


@triton.jit
def boundary(b_key, wanted, room, low, high, reached):
    """Narrows the range [low, high] of the keys until `wanted` to `room` of them lie from `low` on, or all in it are equal.

    Returns (low, high, keys above high, keys from low on).
    """
    over = 0
    while (high > low) & (reached > room):
        step = (high.to(tl.int64) - low.to(tl.int64)) // 4 + 1
        n_1, n_2, n_3 = counts_from(b_key, low, step)
        quarter = (n_1 >= wanted).to(tl.int32) + (n_2 >= wanted).to(tl.int32) + (n_3 >= wanted).to(tl.int32)
        over = tl.where(quarter == 3, over, tl.where(quarter == 2, n_3, tl.where(quarter == 1, n_2, n_1)))
        reached = tl.where(quarter == 3, n_3, tl.where(quarter == 2, n_2, tl.where(quarter == 1, n_1, reached)))
        low = (low + quarter * step).to(tl.int32)
        high = tl.minimum(high.to(tl.int64), low + step - 1).to(tl.int32)
    return low, high, over, reached


@triton.jit
def best(b_key, m_c, wanted, room, here):
    """The `wanted` largest of the keys `[N]`, of which `here` are real (m_c), first ones first; or a few more, up to `room`.

    Returns which they are, their places and their number.
    """
    low = tl.min(tl.where(m_c, b_key, 0x7FFFFFFF), 0)
    high = tl.max(tl.where(m_c, b_key, LOWEST), 0)
    b_key = tl.where(m_c, b_key, LOWEST)
    low, high, over, reached = boundary(b_key, wanted, room, low, high, here)
    m_keep = m_c & (b_key >= low)
    count = reached
    if reached > room:  # more equal keys than there is room for: the first ones
        b_equal = (m_keep & (b_key <= high)).to(tl.int32)
        m_keep = m_keep & ((b_equal == 0) | (tl.cumsum(b_equal, 0) - b_equal < wanted - over))
        count = wanted
    b_keep = m_keep.to(tl.int32)
    return m_keep, tl.cumsum(b_keep, 0) - b_keep, count


@triton.jit
def finish(p_out, p_counts, b_id, m_keep, o_out, wanted, K, N: tl.constexpr):
    """Writes one selection: ids `[K]`, padded with -1, and how many are real."""
    tl.store(p_out + o_out, b_id, mask=m_keep)
    i_k = wanted
    while i_k < K:
        o_k = i_k + tl.arange(0, N)
        tl.store(p_out + o_k, tl.full([N], -1, tl.int32), mask=o_k < K)
        i_k += N
    tl.store(p_counts, wanted)


@triton.jit(do_not_specialize=["START"])
def top_kernel(
    p_ids, p_scores, p_peak, p_mass, p_plan, p_fire, p_out, p_counts, p_kept_ids, p_kept_keys, p_kept, p_arrived, scaling, K,
    HEADS, START, ROOM, CHUNKS, PARTS,
    LANES: tl.constexpr, SOFTMAX: tl.constexpr, MEAN: tl.constexpr, BL: tl.constexpr, BT: tl.constexpr, P: tl.constexpr,
    N: tl.constexpr, SLOTS: tl.constexpr, M: tl.constexpr, FIELDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (chunk of N candidates, sequence and KV head): writes out[bh, :K], ascending, padded with -1, and counts[bh].

    ids: `[bh, ROOM]` candidates, ascending, -1 - id for one that ranks behind all others; scores: their estimates
    `[bh, LANES or 1, ROOM]`; peak, mass `[bh, LANES, PARTS]`: of their softmax, for parts of P candidates. With several chunks
    each keeps its best in kept_ids, kept_keys `[bh, CHUNKS, SLOTS]`, SLOTS >= K, and how many in kept `[bh, CHUNKS]`; M is the
    padded size. arrived `[bh]`, zero before and after, tells which is the last.
    """
    i_chunk, i_bh = tl.program_id(0), START + tl.program_id(1)
    i_b = i_bh // HEADS
    total, fire = tl.load(p_plan + i_b * FIELDS + 1), tl.load(p_fire + i_b)
    begin(PDL)
    if fire != 0:
        here = tl.minimum(tl.maximum(total - i_chunk * N, 0), N)
        o_c = i_chunk * N + tl.arange(0, N)
        m_c = o_c < total
        b_id = tl.load(p_ids + i_bh.to(tl.int64) * ROOM + o_c, mask=m_c, other=0)
        p_own = p_scores + i_bh.to(tl.int64) * ROOM * LANES
        if SOFTMAX:
            o_lse = i_bh * LANES * PARTS
            b_lse = lse_of(p_peak + o_lse, p_mass + o_lse, tl.cdiv(total, P), PARTS, LANES, BL, BT)
            b_s = shares(p_own, b_lse, o_c, m_c, scaling, ROOM, LANES, BL, MEAN)
        else:
            b_s = tl.load(p_own + o_c, mask=m_c, other=0.0)
        b_key = tl.where(b_id < 0, LOWEST, ordered(b_s))
        b_id = tl.where(b_id < 0, -1 - b_id, b_id)
        wanted = tl.minimum(K, here)
        if CHUNKS == 1:
            m_keep, o_out, _ = best(b_key, m_c, wanted, wanted, here)
            finish(p_out + i_bh * K, p_counts + i_bh, b_id, m_keep, o_out, wanted, K, N)
        else:
            o_row = (i_bh.to(tl.int64) * CHUNKS + i_chunk) * SLOTS
            m_keep, o_out, count = best(b_key, m_c, wanted, SLOTS, here)
            tl.store(p_kept_ids + o_row + o_out, b_id, mask=m_keep)
            tl.store(p_kept_keys + o_row + o_out, b_key, mask=m_keep)
            tl.store(p_kept + i_bh * CHUNKS + i_chunk, count)
            tl.debug_barrier()
            if tl.atomic_add(p_arrived + i_bh, 1, sem="acq_rel") == CHUNKS - 1:
                o_m = tl.arange(0, M)
                o_row = i_bh.to(tl.int64) * CHUNKS * SLOTS
                m_slot = o_m < CHUNKS * SLOTS
                b_kept = tl.load(p_kept + i_bh * CHUNKS + o_m // SLOTS, mask=m_slot, other=0, cache_modifier=".cg")
                m_slot = m_slot & (o_m % SLOTS < b_kept)
                b_last = tl.load(p_kept_keys + o_row + o_m, mask=m_slot, other=0, cache_modifier=".cg")
                b_from = tl.load(p_kept_ids + o_row + o_m, mask=m_slot, other=0, cache_modifier=".cg")
                left = tl.sum(m_slot.to(tl.int32), 0)
                wanted = tl.minimum(K, left)
                m_last, o_last, _ = best(b_last, m_slot, wanted, wanted, left)
                finish(p_out + i_bh * K, p_counts + i_bh, b_from, m_last, o_last, wanted, K, N)
                tl.store(p_arrived + i_bh, 0)
    end(PDL)

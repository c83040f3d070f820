"""The k best of many scored ids, ascending, without sorting: a search for the k-th score in a range that shrinks to a quarter.

Many ids are cut into chunks, each of which keeps its own k best, in parallel; the program that ends last searches what they
leave once more. The scores of a group are first made one: the mean or the largest share of a softmax, whose sums come with
the scores. Bytes: lanes x 4 per candidate.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvrecall.core.launch import INTERPRETED, cdiv
from kvrecall.core.triton import begin, end

LOWEST = tl.constexpr(-0x80000000)
NATIVE = tl.constexpr(not INTERPRETED)
_FEWEST_PARTS, _PART_VECTORS = tl.constexpr(32), tl.constexpr(8)
"""Numbers of the shortest vector of parts, one per thread of a warp, and most vectors per lane."""
_NUMBERS = 64
"""Numbers of several lanes that a thread reads at a time; they stay in registers until they are added up."""


def lanes_at_once(candidates: int, parts: int, warps: int) -> int:
    """AT_ONCE of `shares` for a program of `warps` warps. parts: a power of two, the BT of `shares`."""
    step = max(_FEWEST_PARTS.value, parts // _PART_VECTORS.value)
    numbers = cdiv(candidates, 32 * warps) + 2 * max(1, parts // step) * cdiv(step, 32 * warps)
    return max(1, _NUMBERS // numbers)


@triton.jit
def ordered(b_score):
    """int32 that orders like the fp32 scores do (both zeros alike)."""
    b_bits = (b_score + 0.0).to(tl.int32, bitcast=True)
    return b_bits ^ ((b_bits >> 31) & 0x7FFFFFFF)


@triton.jit
def parts_of(p_part, parts, PARTS, other, FIRST: tl.constexpr, LANES: tl.constexpr, BT: tl.constexpr):
    """Numbers of all parts of lanes FIRST to LANES - 1: per lane a tuple of vectors of at least a warp."""
    STEP: tl.constexpr = max(_FEWEST_PARTS, BT // _PART_VECTORS)
    # Volatile: otherwise the compiler moves loads behind the sums of other lanes, and each is waited for.
    b_lanes = ()
    for lane in tl.static_range(FIRST, LANES):
        b_steps = ()
        for i in tl.static_range(max(1, BT // STEP)):
            o_t = i * STEP + tl.arange(0, STEP)
            b_steps = b_steps + (tl.load(p_part + lane * PARTS + o_t, mask=o_t < parts, other=other, volatile=True),)
        b_lanes = b_lanes + (b_steps,)
    return b_lanes


@triton.jit
def lse_of(b_peaks, b_masses):
    """Logarithm of the sum of exponentials over all candidates in one lane, from its parts.

    Every warp computes all of it: that takes fewer instructions than to share the work, and no barrier.
    """
    b_top = ordered(b_peaks[0])
    for i in tl.static_range(1, len(b_peaks)):
        b_top = tl.maximum(b_top, ordered(b_peaks[i]))
    top = tl.max(b_top, 0)  # one instruction for integers
    high = (top ^ ((top >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    high = tl.where(high == float("-inf"), 0.0, high)
    b_sum = b_masses[0] * tl.exp(b_peaks[0] - high)
    for i in tl.static_range(1, len(b_peaks)):
        b_sum += b_masses[i] * tl.exp(b_peaks[i] - high)
    return high + tl.log(tl.maximum(tl.sum(b_sum, 0), 1e-30))


@triton.jit
def with_lanes(
    b_all, p_estimates, p_peak, p_mass, parts, o_c, m_c, scaling, ROOM, PARTS,
    FIRST: tl.constexpr, LANES: tl.constexpr, MEAN: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Takes lanes FIRST to LANES - 1 into `b_all`, see `shares`. All loads are under way before the first one is used."""
    b_estimates = ()
    for lane in tl.static_range(FIRST, LANES):
        b_estimates = b_estimates + (tl.load(p_estimates + lane * ROOM + o_c, mask=m_c, other=float("-inf"), volatile=True),)
    b_peaks = parts_of(p_peak, parts, PARTS, float("-inf"), FIRST, LANES, BT)
    b_masses = parts_of(p_mass, parts, PARTS, 0.0, FIRST, LANES, BT)
    for i in tl.static_range(LANES - FIRST):
        b_share = b_estimates[i] * scaling - lse_of(b_peaks[i], b_masses[i])
        b_all = b_all + tl.exp(b_share) if MEAN else tl.maximum(b_all, b_share)
    return b_all


@triton.jit
def shares(
    p_estimates, p_peak, p_mass, parts, o_c, m_c, scaling, ROOM, PARTS,
    LANES: tl.constexpr, MEAN: tl.constexpr, BT: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Sum over the lanes of the softmax shares of candidates `o_c`; or the logarithm of the largest.

    estimates `[LANES, ROOM]`; peak, mass `[LANES, PARTS]`: see `top_kernel`. AT_ONCE: lanes that are loaded together, as many
    as registers allow.
    """
    b_all = tl.full(o_c.shape, 0.0 if MEAN else float("-inf"), tl.float32)
    for i in tl.static_range((LANES + AT_ONCE - 1) // AT_ONCE):
        b_all = with_lanes(
            b_all, p_estimates, p_peak, p_mass, parts, o_c, m_c, scaling, ROOM, PARTS,
            i * AT_ONCE, min(LANES, (i + 1) * AT_ONCE), MEAN, BT,
        )  # fmt: skip
    return b_all


@triton.jit
def add_three(a_1, a_2, a_3, b_1, b_2, b_3):
    """Sums of three counts in one reduction."""
    return a_1 + b_1, a_2 + b_2, a_3 + b_3


@triton.jit
def counts_above(b_key, p_1, p_2, p_3):
    """How many keys are above p_1, p_2 and p_3: at most N - 1 each, N a power of two."""
    N: tl.constexpr = b_key.shape[0]
    b_1, b_2, b_3 = (b_key > p_1).to(tl.int32), (b_key > p_2).to(tl.int32), (b_key > p_3).to(tl.int32)
    if N <= 1024:  # ten bits each: the sum over a warp is one instruction
        n = tl.sum(b_1 + (b_2 << 10) + (b_3 << 20), 0)
        n_1, n_2, n_3 = n & 1023, (n >> 10) & 1023, n >> 20
    elif N <= 65536:
        n, n_3 = tl.split(tl.sum(tl.join(b_1 + (b_2 << 16), b_3), 0))
        n_1, n_2 = n & 0xFFFF, (n >> 16) & 0xFFFF
    else:
        n_1, n_2, n_3 = tl.reduce((b_1, b_2, b_3), 0, add_three)
    return n_1, n_2, n_3


@triton.jit
def boundary(b_key, wanted, room, low, high, reached):
    """Narrows the range [low, high] of the keys until `wanted` to `room` of them lie from `low` on, or all in it are equal.

    low: the least key. Returns (low, high, keys above high, keys from low on).
    """
    over = 0
    while (high > low) & (reached > room):
        # Four parts: up to p_1, p_2, p_3 and high. A range of int32 needs uint32.
        width = (high - low).to(tl.uint32, bitcast=True)
        part = width >> 2
        p_1 = low + part.to(tl.int32, bitcast=True)
        p_2 = low + tl.minimum(2 * part + 1, width).to(tl.int32, bitcast=True)
        p_3 = low + tl.minimum(3 * part + 2, width).to(tl.int32, bitcast=True)
        n_1, n_2, n_3 = counts_above(b_key, p_1, p_2, p_3)
        over = tl.where(n_3 >= wanted, over, tl.where(n_2 >= wanted, n_3, tl.where(n_1 >= wanted, n_2, n_1)))
        reached = tl.where(n_3 >= wanted, n_3, tl.where(n_2 >= wanted, n_2, tl.where(n_1 >= wanted, n_1, reached)))
        high = tl.where(n_3 >= wanted, high, tl.where(n_2 >= wanted, p_3, tl.where(n_1 >= wanted, p_2, p_1)))
        low = tl.where(n_3 >= wanted, p_3 + 1, tl.where(n_2 >= wanted, p_2 + 1, tl.where(n_1 >= wanted, p_1 + 1, low)))
    return low, high, over, reached


@triton.jit
def best(b_key, m_c, wanted, room, here):
    """The `wanted` largest of the keys `[N]`, of which `here` are real (m_c), first ones first; or a few more, up to `room`.

    Returns which they are, their places and their number.
    """
    b_key = tl.where(m_c, b_key, LOWEST)
    high, below = tl.split(tl.max(tl.join(b_key, tl.where(m_c, ~b_key, LOWEST)), 0))
    low, high, over, reached = boundary(b_key, wanted, room, ~below, high, here)
    # Equal keys may be more than there is room for: only the first ones. Both counts in one scan, without the own key.
    count = tl.where(reached > room, wanted, reached)
    m_above, m_equal = m_c & (b_key > high), m_c & (b_key >= low) & (b_key <= high)
    WIDE: tl.constexpr = 32 if b_key.shape[0] > 65536 else 16
    b_one = m_above.to(tl.int64 if WIDE == 32 else tl.uint32)
    b_one += m_equal.to(b_one.dtype) << WIDE
    b_before = tl.cumsum(b_one, 0) - b_one
    b_equal = (b_before >> WIDE).to(tl.int32)
    b_place = (b_before & ((1 << WIDE) - 1)).to(tl.int32) + tl.minimum(b_equal, count - over)
    return m_above | (m_equal & (b_equal < count - over)), b_place, count


@triton.jit
def put(p_x, b_x, m_x):
    """Stores int32 where m_x. Each thread stores its own: `tl.store` would first exchange all of it through shared memory."""
    if NATIVE:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $3, 0; @p st.global.b32 [$1], $2; mov.b32 $0, 0; }", "=r,l,r,r",
            [p_x.to(tl.int64), b_x, m_x.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        tl.store(p_x, b_x, mask=m_x)


@triton.jit
def finish(p_out, p_counts, b_id, m_keep, o_out, wanted, K, N: tl.constexpr):
    """Writes one selection: ids `[K]`, padded with -1, and how many are real."""
    put(p_out + o_out, b_id, m_keep)
    i_k = wanted
    while i_k < K:
        o_k = i_k + tl.arange(0, N)
        tl.store(p_out + o_k, tl.full([N], -1, tl.int32), mask=o_k < K)
        i_k += N
    tl.store(p_counts, wanted)


@triton.jit(do_not_specialize=["START", "FIELDS"])
def top_kernel(
    p_ids, p_scores, p_peak, p_mass, p_plan, p_fire, p_out, p_counts, p_kept_ids, p_kept_keys, p_kept, p_arrived, scaling, K,
    START, ROOM, CHUNKS, PARTS, FIELDS,
    HEADS: tl.constexpr, LANES: tl.constexpr, SOFTMAX: tl.constexpr, MEAN: tl.constexpr, BT: tl.constexpr, P: tl.constexpr,
    AT_ONCE: tl.constexpr, N: tl.constexpr, SLOTS: tl.constexpr, M: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (chunk of N candidates, sequence and KV head): writes out[bh, :K], ascending, padded with -1, and counts[bh].

    Programs beyond the last candidate do nothing.

    ids: `[bh, ROOM]` candidates, ascending, -1 - id for one that ranks behind all others, ROOM a multiple of 4; scores: their
    estimates `[bh, LANES or 1, ROOM]`; peak, mass `[bh, LANES, PARTS]`: of their softmax, for parts of P candidates. AT_ONCE:
    see `shares`. With several chunks each keeps its best in kept_ids, kept_keys `[bh, CHUNKS, SLOTS]`, SLOTS >= K, and how many
    in kept `[bh, CHUNKS]`; M is the padded size. arrived `[bh]`, zero before and after, tells which is the last.
    """
    i_chunk, i_bh = tl.program_id(0), START + tl.program_id(1)
    i_b = i_bh // HEADS
    total, fire = tl.load(p_plan + i_b * FIELDS + 1), tl.load(p_fire + i_b)
    begin(PDL)
    chunks = tl.maximum(tl.cdiv(total, N), 1)
    if (fire != 0) & (i_chunk < chunks):
        here = tl.minimum(total - i_chunk * N, N)
        o_c = i_chunk * N + tl.arange(0, N)
        m_c = o_c < total
        m_row = o_c < tl.cdiv(total, 4) * 4  # rows are padded, so that a thread can read four at a time
        b_id = tl.load(p_ids + i_bh.to(tl.int64) * ROOM + o_c, mask=m_row, other=0)
        p_own = p_scores + i_bh.to(tl.int64) * ROOM * LANES
        if SOFTMAX:
            o_lse, parts = i_bh * LANES * PARTS, tl.cdiv(total, P)
            b_s = shares(
                p_own, p_peak + o_lse, p_mass + o_lse, parts, o_c, m_row, scaling, ROOM, PARTS, LANES, MEAN, BT, AT_ONCE
            )
        else:
            b_s = tl.load(p_own + o_c, mask=m_row, other=0.0)
        b_key = tl.where(b_id < 0, LOWEST, ordered(b_s))
        b_id = tl.where(b_id < 0, -1 - b_id, b_id)
        wanted = tl.minimum(K, here)
        if CHUNKS == 1:
            m_keep, o_out, _ = best(b_key, m_c, wanted, wanted, here)
            finish(p_out + i_bh * K, p_counts + i_bh, b_id, m_keep, o_out, wanted, K, N)
        else:
            o_row = (i_bh.to(tl.int64) * CHUNKS + i_chunk) * SLOTS
            m_keep, o_out, count = best(b_key, m_c, wanted, SLOTS, here)
            put(p_kept_ids + o_row + o_out, b_id, m_keep)
            put(p_kept_keys + o_row + o_out, b_key, m_keep)
            tl.store(p_kept + i_bh * CHUNKS + i_chunk, count)
            tl.debug_barrier()
            if tl.atomic_add(p_arrived + i_bh, 1, sem="acq_rel") == chunks - 1:
                o_m, o_chunk = tl.arange(0, M), tl.arange(0, M // SLOTS)
                o_row = i_bh.to(tl.int64) * CHUNKS * SLOTS
                m_slot, p_count = o_m < chunks * SLOTS, p_kept + i_bh * CHUNKS
                # No load waits for another one; what a chunk did not keep is dropped afterwards.
                b_last = tl.load(p_kept_keys + o_row + o_m, mask=m_slot, other=0, cache_modifier=".cg")
                b_from = tl.load(p_kept_ids + o_row + o_m, mask=m_slot, other=0, cache_modifier=".cg")
                b_count = tl.load(p_count + o_m // SLOTS, mask=m_slot, other=0, cache_modifier=".cg")
                left = tl.sum(tl.load(p_count + o_chunk, mask=o_chunk < chunks, other=0, cache_modifier=".cg"), 0)
                m_slot = o_m % SLOTS < b_count
                wanted = tl.minimum(K, left)
                m_last, o_last, _ = best(b_last, m_slot, wanted, wanted, left)
                finish(p_out + i_bh * K, p_counts + i_bh, b_from, m_last, o_last, wanted, K, N)
                tl.store(p_arrived + i_bh, 0)
    end(PDL)

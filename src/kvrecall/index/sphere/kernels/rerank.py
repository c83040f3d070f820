"""Stage II: the candidates in ascending order, and their estimated products with the queries.

Candidates are the `wanted` keys of the largest scores, lower positions first among equals. Where each tile's part begins
follows from the counts of the tiles before it, so no order depends on timing. Bytes: 1 per token, 6 S per candidate.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvrecall.index.sphere.kernels.encode import weight_values
from kvrecall.index.sphere.kernels.scan import read_scores
from kvrecall.overlap import begin, end


@triton.jit
def compact_kernel(
    p_plan, p_fire, p_scores, p_reach, p_total, p_ids, HEADS, CAPACITY, TILES, ROOM,
    T: tl.constexpr, SUB: tl.constexpr, BT: tl.constexpr, FIELDS: tl.constexpr, BINS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (tile, sequence and KV head): writes the tile's part of the candidates ids[bh, ·], int32.

    Most tiles take all or none of the keys of the least score; only one has to count which come first.
    """
    i_tile, i_bh = tl.program_id(0), tl.program_id(1)
    i_b = i_bh // HEADS
    tokens = tl.load(p_plan + i_b * FIELDS)
    wanted = tl.load(p_plan + i_b * FIELDS + 1)
    begin(PDL)
    if (tl.load(p_fire + i_b) != 0) & (i_tile * (SUB * T) < tokens):
        o_bin = tl.arange(0, BINS)
        b_total = tl.load(p_total + i_bh * BINS + o_bin)
        least = tl.max(tl.where(b_total >= wanted, o_bin, 0), 0)
        room = wanted - tl.sum(tl.where(o_bin == least + 1, b_total, 0), 0)  # for keys of the least score
        o_tile = tl.arange(0, BT)
        p_least = p_reach + (i_bh * BINS + least) * TILES
        b_reach = tl.load(p_least + o_tile, mask=o_tile <= i_tile, other=0)
        b_above = tl.load(p_least + TILES + o_tile, mask=o_tile <= tl.where(least + 1 < BINS, i_tile, -1), other=0)
        above_before = tl.sum(tl.where(o_tile < i_tile, b_above, 0), 0)
        equal_before = tl.sum(tl.where(o_tile < i_tile, b_reach, 0), 0) - above_before
        equal_here = tl.sum(tl.where(o_tile == i_tile, b_reach - b_above, 0), 0)
        p_out = p_ids + i_bh.to(tl.int64) * ROOM + above_before + tl.minimum(equal_before, room)
        p_score = p_scores + i_bh.to(tl.int64) * CAPACITY
        divided = (equal_before < room) & (equal_before + equal_here > room)
        cut = tl.where(equal_before + equal_here <= room, least, least + 1)
        for i_sub in range(SUB):
            o_t = i_tile * (SUB * T) + i_sub * T + tl.arange(0, T)
            b_score = read_scores(p_score, o_t, tokens)
            b_keep = (b_score >= cut).to(tl.int32)
            if divided:
                b_equal = (b_score == least).to(tl.int32)
                b_rank = equal_before + tl.cumsum(b_equal, 0) - b_equal
                b_keep += b_equal * (b_rank < room).to(tl.int32)
                equal_before += tl.sum(b_equal, 0)
            b_place = tl.cumsum(b_keep, 0)
            tl.store(p_out + b_place - 1, o_t, mask=b_keep == 1)
            p_out += tl.max(b_place, 0)
    end(PDL)


@triton.jit
def block_level(b_low, b_mid, b_top, U: tl.constexpr, u: tl.constexpr):
    """The 24 bits of levels of block u, from bit 0 on; three words hold those of four blocks, three bytes those of one."""
    if U == 1:
        b_level = b_low | (b_mid << 8) | (b_top << 16)
    elif u == 0:
        b_level = b_low
    elif u == 1:
        b_level = ((b_low >> 24) & 255) | (b_mid << 8)
    elif u == 2:
        b_level = ((b_mid >> 16) & 65535) | (b_top << 16)
    else:
        b_level = b_top >> 8
    return b_level


@triton.jit
def in_rows(p_x, o_x):
    """p_x + o_x `[R, BU]`, and tells the compiler that neighbouring threads are to read neighbouring columns.

    It would choose otherwise for every load that is not contiguous, and shuffle codes from one order to the other.
    """
    return tl.multiple_of(tl.max_contiguous(p_x + o_x, (1, o_x.shape[1])), (1, 1))


@triton.jit
def rerank_kernel(
    p_signs, p_magnitudes, p_weights, p_levels, p_rotated, p_plan, p_fire, p_ids, p_estimates, p_peak, p_mass, p_shifts,
    scaling, HEADS, CAPACITY, ROOM, PARTS, UNITS,
    D: tl.constexpr, S: tl.constexpr, U: tl.constexpr, BU: tl.constexpr, LANES: tl.constexpr, R: tl.constexpr,
    FIELDS: tl.constexpr, LARGEST: tl.constexpr, SOFTMAX: tl.constexpr, SHIFT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (R candidates, sequence and KV head): writes their estimates[bh, lane, ·] (Eq. 24).

    The id of a key of zero norm becomes -1 - id: it ranks behind all others. LARGEST: keeps only the group's largest estimate,
    in lane 0; SHIFT: after adding its head's shifts `[bh, lane]` to each. SOFTMAX: also writes peak and mass `[bh, lane, part]`
    of a softmax over the candidates. A key has UNITS units of U blocks, which one thread reads: 4 blocks as one word of signs
    and three of levels, or 1 as bytes. levels: fp32 `[16]`, negative magnitudes, then positive ones.
    """
    i_part, i_bh = tl.program_id(0), tl.program_id(1)
    i_b = i_bh // HEADS
    wanted = tl.load(p_plan + i_b * FIELDS + 1)
    begin(PDL)
    if (tl.load(p_fire + i_b) != 0) & (i_part * R < wanted):
        o_u, o_c = tl.arange(0, BU), i_part * R + tl.arange(0, R)
        m_c, m_q = o_c < wanted, o_u < S // U
        p_id = p_ids + i_bh.to(tl.int64) * ROOM + o_c
        b_id = tl.load(p_id, mask=m_c, other=0)
        m_u = m_c[:, None] & m_q[None, :]
        o_unit = (i_bh.to(tl.int64) * CAPACITY + b_id)[:, None] * UNITS + o_u[None, :]
        b_sign = tl.load(in_rows(p_signs, o_unit), mask=m_u, other=0).to(tl.int32)
        b_low = tl.load(in_rows(p_magnitudes, o_unit * 3), mask=m_u, other=0).to(tl.int32)
        b_mid = tl.load(in_rows(p_magnitudes, o_unit * 3 + 1), mask=m_u, other=0).to(tl.int32)
        b_top = tl.load(in_rows(p_magnitudes, o_unit * 3 + 2), mask=m_u, other=0).to(tl.int32)
        b_norm = tl.zeros([R, BU], tl.float32)
        b_dots = ()
        for _ in tl.static_range(LANES):
            b_dots = b_dots + (b_norm,)
        for u in tl.static_range(U):
            b_weight = weight_values(tl.load(in_rows(p_weights, o_unit * U + u), mask=m_u, other=0))
            b_norm += b_weight
            b_level = block_level(b_low, b_mid, b_top, U, u)
            b_xs = ()
            for j in tl.static_range(8):
                b_index = ((b_level >> (3 * j)) & 7) | (((b_sign >> (8 * u + j)) & 1) << 3)
                b_xs = b_xs + (tl.load(in_rows(p_levels, b_index)),)
            b_sums = ()
            for lane in tl.static_range(LANES):
                p_query = p_rotated + (i_bh * LANES + lane) * D + (o_u * U + u) * 8
                b_dot = b_xs[0] * tl.load(p_query, mask=m_q, other=0.0)[None, :]
                for j in tl.static_range(1, 8):
                    b_dot += b_xs[j] * tl.load(p_query + j, mask=m_q, other=0.0)[None, :]
                b_sums = b_sums + (b_dots[lane] + b_weight * b_dot,)
            b_dots = b_sums
        tl.store(p_id, -1 - b_id, mask=m_c & (tl.sum(b_norm, 1) == 0.0))
        b_best = tl.full([R], float("-inf"), tl.float32)
        p_estimate = p_estimates + i_bh.to(tl.int64) * (ROOM if LARGEST else LANES * ROOM) + o_c
        for lane in tl.static_range(LANES):
            b_estimate = tl.sum(b_dots[lane], 1)
            if SHIFT:
                b_estimate += tl.load(p_shifts + i_bh * LANES + lane)
            if LARGEST:
                b_best = tl.maximum(b_best, b_estimate)
            else:
                tl.store(p_estimate + lane * ROOM, b_estimate, mask=m_c)
            if SOFTMAX:
                b_x = tl.where(m_c, b_estimate * scaling, float("-inf"))
                peak = tl.max(b_x, 0)
                tl.store(p_peak + (i_bh * LANES + lane) * PARTS + i_part, peak)
                tl.store(p_mass + (i_bh * LANES + lane) * PARTS + i_part, tl.sum(tl.exp(b_x - peak), 0))
        if LARGEST:
            tl.store(p_estimate, b_best, mask=m_c)
    end(PDL)

"""Stage II: the candidates in ascending order, and their estimated products with the queries.

Candidates are the `wanted` keys of the largest scores, lower positions first among equals. Where each tile's part begins
follows from the counts of the tiles before it, so no order depends on timing. Bytes: 1 per token, 6 S per candidate.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def compact_kernel(
    p_plan, p_fire, p_scores, p_reach, p_total, p_ids, HEADS, CAPACITY, TILES, ROOM,
    T: tl.constexpr, SUB: tl.constexpr, BT: tl.constexpr, FIELDS: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """Program (tile, sequence and KV head): writes the tile's part of the candidates ids[bh, ·], int32."""
    i_tile, i_bh = tl.program_id(0), tl.program_id(1)
    i_b = i_bh // HEADS
    tokens = tl.load(p_plan + i_b * FIELDS)
    wanted = tl.load(p_plan + i_b * FIELDS + 1)
    if (tl.load(p_fire + i_b) != 0) & (i_tile * (SUB * T) < tokens):
        o_bin = tl.arange(0, BINS)
        b_total = tl.load(p_total + i_bh * BINS + o_bin)
        least = tl.max(tl.where(b_total >= wanted, o_bin, 0), 0)
        above = tl.sum(tl.where(o_bin == least + 1, b_total, 0), 0)
        o_tile = tl.arange(0, BT)
        p_before = p_reach + (i_bh * TILES + o_tile) * BINS + least
        above_before = tl.sum(tl.load(p_before + 1, mask=o_tile < i_tile, other=0), 0)
        equal_before = tl.sum(tl.load(p_before, mask=o_tile < i_tile, other=0), 0) - above_before
        p_out = p_ids + i_bh.to(tl.int64) * ROOM + above_before + tl.minimum(equal_before, wanted - above)
        p_score = p_scores + i_bh.to(tl.int64) * CAPACITY
        for i_sub in range(SUB):
            o_t = i_tile * (SUB * T) + i_sub * T + tl.arange(0, T)
            b_score = tl.load(p_score + o_t, mask=o_t < tokens, other=0).to(tl.int32)
            b_equal = ((b_score == least) & (o_t < tokens)).to(tl.int32)
            b_above = ((b_score > least) & (o_t < tokens)).to(tl.int32)
            b_both = tl.cumsum(b_equal + (b_above << 16), 0)  # both ranks in one pass: T is below 2^15
            b_rank = equal_before + (b_both & 0xFFFF) - b_equal
            m_keep = (b_above == 1) | ((b_equal == 1) & (b_rank < wanted - above))
            # Of the equal ones before a token in this block, so many were kept.
            b_kept = tl.minimum(tl.maximum(wanted - above - equal_before, 0), (b_both & 0xFFFF) - b_equal)
            tl.store(p_out + (b_both >> 16) - b_above + b_kept, o_t, mask=m_keep)
            p_out += tl.sum(m_keep.to(tl.int32), 0)
            equal_before += tl.sum(b_equal, 0)


@triton.jit
def coordinate(b_sign, b_level, p_levels, j: tl.constexpr):
    """Coordinate j of coded blocks, without the block's weight: 16 levels, the negative ones first."""
    return tl.load(p_levels + (((b_level >> (3 * j)) & 7) | (((b_sign >> j) & 1) << 3)))


@triton.jit
def rerank_kernel(
    p_signs, p_magnitudes, p_weights, p_levels, p_places, p_rotated, p_plan, p_fire, p_ids, p_estimates, HEADS, CAPACITY, ROOM,
    D: tl.constexpr, S: tl.constexpr, BS: tl.constexpr, LANES: tl.constexpr, R: tl.constexpr, FIELDS: tl.constexpr,
    LARGEST: tl.constexpr,
):  # fmt: skip
    """Program (R candidates, sequence and KV head): writes their estimates[bh, lane, ·] (Eq. 24).

    The id of a key of zero norm becomes -1 - id: it ranks behind all others. LARGEST: keeps only the group's largest estimate,
    in lane 0. levels: fp32 `[16]`, negative magnitudes, then positive ones. places: 0, 1, 2, …; read from memory, so that the
    compiler takes no load for a wide one: bytes, weights and triples of bytes would then lie in registers in three ways, and be
    shuffled from one to the other.
    """
    i_part, i_bh = tl.program_id(0), tl.program_id(1)
    i_b = i_bh // HEADS
    wanted = tl.load(p_plan + i_b * FIELDS + 1)
    if (tl.load(p_fire + i_b) != 0) & (i_part * R < wanted):
        o_s = tl.load(p_places + tl.arange(0, BS))
        o_c = i_part * R + tl.arange(0, R)
        m_c, m_q = o_c < wanted, o_s < S
        p_id = p_ids + i_bh.to(tl.int64) * ROOM + o_c
        b_id = tl.load(p_id, mask=m_c, other=0)
        m_s = m_c[:, None] & m_q[None, :]
        o_row = i_bh.to(tl.int64) * CAPACITY * S
        o_code = b_id[:, None] * S + o_s[None, :]
        b_sign = tl.load(p_signs + o_row + o_code, mask=m_s, other=0).to(tl.int32)
        b_weight = tl.load(p_weights + o_row + o_code, mask=m_s, other=0.0).to(tl.float32)
        p_level = p_magnitudes + o_row * 3
        b_level = tl.load(p_level + o_code * 3, mask=m_s, other=0).to(tl.int32)
        b_level += tl.load(p_level + o_code * 3 + 1, mask=m_s, other=0).to(tl.int32) << 8
        b_level += tl.load(p_level + o_code * 3 + 2, mask=m_s, other=0).to(tl.int32) << 16
        b_0 = coordinate(b_sign, b_level, p_levels, 0)
        b_1 = coordinate(b_sign, b_level, p_levels, 1)
        b_2 = coordinate(b_sign, b_level, p_levels, 2)
        b_3 = coordinate(b_sign, b_level, p_levels, 3)
        b_4 = coordinate(b_sign, b_level, p_levels, 4)
        b_5 = coordinate(b_sign, b_level, p_levels, 5)
        b_6 = coordinate(b_sign, b_level, p_levels, 6)
        b_7 = coordinate(b_sign, b_level, p_levels, 7)
        m_zero = tl.sum(b_weight, 1) == 0.0
        tl.store(p_id, -1 - b_id, mask=m_c & m_zero)
        b_best = tl.full([R], float("-inf"), tl.float32)
        for lane in tl.static_range(LANES):
            p_lane = p_rotated + (i_bh * LANES + lane) * D + o_s * 8
            b_dot = b_0 * tl.load(p_lane, mask=m_q, other=0.0)[None, :]
            b_dot += b_1 * tl.load(p_lane + 1, mask=m_q, other=0.0)[None, :]
            b_dot += b_2 * tl.load(p_lane + 2, mask=m_q, other=0.0)[None, :]
            b_dot += b_3 * tl.load(p_lane + 3, mask=m_q, other=0.0)[None, :]
            b_dot += b_4 * tl.load(p_lane + 4, mask=m_q, other=0.0)[None, :]
            b_dot += b_5 * tl.load(p_lane + 5, mask=m_q, other=0.0)[None, :]
            b_dot += b_6 * tl.load(p_lane + 6, mask=m_q, other=0.0)[None, :]
            b_dot += b_7 * tl.load(p_lane + 7, mask=m_q, other=0.0)[None, :]
            b_estimate = tl.sum(b_dot * b_weight, 1)
            if LARGEST:
                b_best = tl.maximum(b_best, b_estimate)
            else:
                tl.store(p_estimates + (i_bh * LANES + lane).to(tl.int64) * ROOM + o_c, b_estimate, mask=m_c)
        if LARGEST:
            tl.store(p_estimates + i_bh.to(tl.int64) * ROOM + o_c, b_best, mask=m_c)

"""Stage I over all keys: scores by table look-ups, and how many keys of each tile reach each score.

A score is one byte: 0 for keys that must not be found, 1 for keys of zero norm, else 2 + the sum of the entries (the group's
largest). Bytes per token and KV head: S sign bytes read, 1 written; the tables stay in L1.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def scan_kernel(
    p_signs, p_weights, p_zero_norms, p_barred, p_tables, p_plan, p_fire, p_scores, p_reach, p_total, HEADS, CAPACITY, TILES,
    S: tl.constexpr, BYTES: tl.constexpr, NW: tl.constexpr, BW: tl.constexpr, WORDS: tl.constexpr, LANES: tl.constexpr,
    T: tl.constexpr, SUB: tl.constexpr, HAS_BARRED: tl.constexpr, FIELDS: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """Program (tile of SUB x T tokens, sequence and KV head). Sign bytes are read BYTES at a time.

    reach[bh, tile, s] = tokens of the tile whose score is >= s; total[bh, s] = their sum over the tiles.
    """
    i_tile, i_bh = tl.program_id(0), tl.program_id(1)
    i_b = i_bh // HEADS
    tokens = tl.load(p_plan + i_b * FIELDS)
    if (tl.load(p_fire + i_b) != 0) & (i_tile * (SUB * T) < tokens):
        o_w = tl.arange(0, BW)
        b_counts = tl.zeros([BINS], tl.int32)
        any_zero = tl.load(p_zero_norms + i_bh)
        o_row = i_bh.to(tl.int64) * CAPACITY
        p_sign, p_score, p_table = p_signs + o_row * NW, p_scores + o_row, p_tables + i_bh * (WORDS * S * 256)
        for i_sub in range(SUB):
            o_t = i_tile * (SUB * T) + i_sub * T + tl.arange(0, T)
            m_t = o_t < tokens
            m_w = m_t[:, None] & (o_w < NW)[None, :]
            b_codes = tl.load(p_sign + o_t[:, None] * NW + o_w[None, :], mask=m_w, other=0).to(tl.int32)
            b_score = tl.zeros([T], tl.int32)
            for w in tl.static_range(WORDS):
                b_sum = tl.zeros([T, BW], tl.int32)
                for i_byte in tl.static_range(BYTES):
                    o_entry = (w * S + o_w * BYTES + i_byte) * 256
                    b_byte = (b_codes >> (8 * i_byte)) & 255
                    b_sum += tl.load(p_table + (o_entry[None, :] + b_byte), mask=(o_w < NW)[None, :], other=0)
                b_lanes = tl.sum(b_sum, 1)
                for lane in tl.static_range(4):
                    if w * 4 + lane < LANES:
                        b_score = tl.maximum(b_score, (b_lanes >> (8 * lane)) & 255)
            b_score += 2
            if any_zero != 0:
                b_norm = tl.zeros([T], tl.float32)
                for s in range(S):
                    b_norm += tl.load(p_weights + o_row * S + o_t * S + s, mask=m_t, other=0.0).to(tl.float32)
                b_score = tl.where(b_norm == 0.0, 1, b_score)
            if HAS_BARRED:
                b_score = tl.where(tl.load(p_barred + o_row + o_t, mask=m_t, other=1) != 0, 0, b_score)
            b_score = tl.where(m_t, b_score, 0)
            tl.store(p_score + o_t, b_score.to(tl.uint8), mask=m_t)
            b_counts += tl.histogram(b_score, BINS)
        b_reach = tl.sum(b_counts, 0) - tl.cumsum(b_counts, 0) + b_counts
        o_bin = tl.arange(0, BINS)
        tl.store(p_reach + (i_bh * TILES + i_tile) * BINS + o_bin, b_reach)
        tl.atomic_add(p_total + i_bh * BINS + o_bin, b_reach, sem="relaxed")

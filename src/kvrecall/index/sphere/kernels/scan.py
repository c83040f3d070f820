"""Stage I over all keys: a score for each, and how many keys of each tile reach each score.

A score is one byte: 0 for keys that must not be found, 1 for keys of zero norm, else 2 + the first stage's (the group's
largest). Bytes per token and KV head: S sign bytes read, 1 written and read again from cache.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvrecall.core.overlap import begin, end


@triton.jit
def row_of_scores(CAPACITY):
    """Bytes between the scores of one KV head and the next: sixteen at a time are read."""
    return tl.cdiv(CAPACITY, 16) * 16


@triton.jit
def read_scores(p_score, o_t, tokens):
    """Scores of tokens `o_t`, 0 for those that are not there.

    Sixteen neighbours are read at once if any of them is real: a mask that divided them would have bytes read one by one.
    """
    b_score = tl.load(p_score + o_t, mask=o_t // 16 < tl.cdiv(tokens, 16), other=0)
    return tl.where(o_t < tokens, b_score.to(tl.int32), 0)


@triton.jit
def write_scores(p_score, b_score, o_t, tokens):
    """Scores of tokens `o_t`, 0 for the rest of the last sixteen."""
    tl.store(p_score + o_t, tl.where(o_t < tokens, b_score, 0).to(tl.uint8), mask=o_t // 16 < tl.cdiv(tokens, 16))


@triton.jit
def tally(
    p_score, p_weights, p_zero_norms, p_barred, p_reach, p_total, i_first, tokens, i_bh, i_tile, CAPACITY, TILES,
    S: tl.constexpr, T: tl.constexpr, SUB: tl.constexpr, HAS_BARRED: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """Puts keys that have no direction or are barred in their places, and counts the scores that this program has written.

    reach[bh, s, tile] = tokens of the tile whose score is >= s; total[bh, s] = their sum over the tiles.
    """
    tl.debug_barrier()
    any_zero = tl.load(p_zero_norms + i_bh)
    o_row = i_bh.to(tl.int64) * CAPACITY
    b_counts = tl.zeros([BINS], tl.int32)
    for i_sub in range(SUB):
        o_t = i_first + i_sub * T + tl.arange(0, T)
        m_t = o_t < tokens
        b_score = read_scores(p_score, o_t, tokens)
        if any_zero != 0:
            b_norm = tl.zeros([T], tl.float32)
            for s in range(S):
                b_norm += tl.load(p_weights + (o_row + o_t) * S + s, mask=m_t, other=1.0).to(tl.float32)
            b_score = tl.where(b_norm == 0.0, 1, b_score)
            tl.store(p_score + o_t, b_score.to(tl.uint8), mask=m_t)
        if HAS_BARRED:
            b_score = tl.where(tl.load(p_barred + o_row + o_t, mask=m_t, other=1) != 0, 0, b_score)
            tl.store(p_score + o_t, b_score.to(tl.uint8), mask=m_t)
        b_counts += tl.histogram(b_score, BINS)
    b_reach = tl.sum(b_counts, 0) - tl.cumsum(b_counts, 0) + b_counts
    o_bin = tl.arange(0, BINS)
    tl.store(p_reach + (i_bh * BINS + o_bin) * TILES + i_tile, b_reach)
    tl.atomic_add(p_total + i_bh * BINS + o_bin, b_reach, sem="relaxed")


@triton.jit(do_not_specialize=["START"])
def collision_kernel(
    p_signs, p_weights, p_zero_norms, p_barred, p_tables, p_plan, p_fire, p_scores, p_reach, p_total, HEADS, START, CAPACITY,
    TILES,
    S: tl.constexpr, BYTES: tl.constexpr, NW: tl.constexpr, BW: tl.constexpr, WORDS: tl.constexpr, LANES: tl.constexpr,
    T: tl.constexpr, SUB: tl.constexpr, HAS_BARRED: tl.constexpr, FIELDS: tl.constexpr, BINS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (tile of SUB x T tokens, sequence and KV head): scores by table look-ups. Sign bytes are read BYTES at a time."""
    begin(PDL)
    i_tile, i_bh = tl.program_id(0), START + tl.program_id(1)
    i_b = i_bh // HEADS
    tokens = tl.load(p_plan + i_b * FIELDS)
    if (tl.load(p_fire + i_b) != 0) & (i_tile * (SUB * T) < tokens):
        o_w = tl.arange(0, BW)
        o_row = i_bh.to(tl.int64) * CAPACITY
        p_sign, p_table = p_signs + o_row * NW, p_tables + i_bh * (WORDS * S * 256)
        p_score = p_scores + i_bh.to(tl.int64) * row_of_scores(CAPACITY)
        for i_sub in range(SUB):
            o_t = i_tile * (SUB * T) + i_sub * T + tl.arange(0, T)
            m_w = (o_t < tokens)[:, None] & (o_w < NW)[None, :]
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
            write_scores(p_score, b_score + 2, o_t, tokens)
        tally(p_score, p_weights, p_zero_norms, p_barred, p_reach, p_total, i_tile * (SUB * T), tokens, i_bh, i_tile, CAPACITY,
              TILES, S, T, SUB, HAS_BARRED, BINS)  # fmt: skip
    end(PDL)

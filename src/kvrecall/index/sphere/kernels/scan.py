"""Stage I over all keys: one score per key, and how many keys of each tile reach each score.

A score is one byte: 0 for keys that must not be found, 1 for keys of zero norm, else 2 + the score of stage I (the group's
largest). Bytes per token and KV head: S sign bytes read, 1 written and read again from cache.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvrecall.core.triton import begin, end
from kvrecall.index.sphere.kernels.blocks import begin_of, blocks_of, look_up, numbers_of, one_block, rows_of
from kvrecall.index.sphere.kernels.work import first_part, part, parts, step, stop, tokens_of_part

UNROLLED_SUMS = tl.constexpr(1024)
"""Sums of shifts that a program reads without a loop; 4M tokens have as many."""


@triton.jit
def row_of_scores(CAPACITY):
    """Stride of scores between KV heads, in bytes: a multiple of sixteen, for wide loads."""
    return tl.cdiv(CAPACITY, 16) * 16


@triton.jit
def read_scores(p_score, o_t, tokens):
    """Scores of tokens `o_t`, 0 beyond the last token.

    The mask is the same for sixteen neighbours, so that they are read by one load.
    """
    b_score = tl.load(p_score + o_t, mask=o_t // 16 < tl.cdiv(tokens, 16), other=0)
    return tl.where(o_t < tokens, b_score.to(tl.int32), 0)


@triton.jit
def write_scores(p_score, b_score, o_t, tokens, SINKS: tl.constexpr):
    """Writes scores of tokens `o_t`; 0 for the first SINKS tokens and up to the end of the last sixteen."""
    m_found = (o_t >= SINKS) & (o_t < tokens)
    tl.store(p_score + o_t, tl.where(m_found, b_score, 0).to(tl.uint8), mask=o_t // 16 < tl.cdiv(tokens, 16))


@triton.jit
def lower_zero_norms(
    p_score, p_weights, p_table, i_first, tokens, i_h, TABLE, BYTES,
    BLOCK: tl.constexpr, S: tl.constexpr, T: tl.constexpr, SUB: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Gives score 1 to keys of zero norm; arguments as in `tally`. Rarely needed, so written for few registers, not for
    speed."""
    PIECE: tl.constexpr = T if T < BLOCK else BLOCK
    for i_piece in range(SUB * T // PIECE):
        o_in, start = tl.arange(0, PIECE), i_first + i_piece * PIECE
        m_t = o_in < tokens - start
        o_begin = begin_of(one_block(p_table, TABLE, start, BLOCK), numbers_of(p_weights, BYTES), i_h, start, BLOCK, PIECE, S)
        p_weight = p_weights + o_begin + o_in * S
        b_norm = tl.zeros([PIECE], tl.float32)
        for s in range(S):
            b_norm += tl.load(p_weight + s, mask=m_t, other=1.0).to(tl.float32)
        tl.store(p_score + start + o_in, tl.full([PIECE], 1, tl.uint8), mask=m_t & (b_norm == 0.0) & (start + o_in >= SINKS))
    tl.debug_barrier()


@triton.jit
def tally(
    p_score, p_weights, p_table, p_zero_norm, p_excluded, p_reach, p_total, i_first, tokens, i_bh, i_h, i_tile, CAPACITY, TILES,
    TABLE, BYTES, BLOCK: tl.constexpr, S: tl.constexpr, T: tl.constexpr, SUB: tl.constexpr, HAS_EXCLUDED: tl.constexpr,
    BINS: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Sets the scores of keys of zero norm and of excluded keys, and counts the scores that this program has written.

    zero_norm: not 0 if the head has a key of zero norm. weights: of head i_h in blocks with stride BYTES in bytes. table: the
    sequence's blocks, at most TABLE.
    reach[bh, s, tile] = tokens of the tile with score >= s; total[bh, s] = their sum over the tiles.
    """
    tl.debug_barrier()
    if tl.load(p_zero_norm) != 0:
        lower_zero_norms(p_score, p_weights, p_table, i_first, tokens, i_h, TABLE, BYTES, BLOCK, S, T, SUB, SINKS)
    o_row = i_bh.to(tl.int64) * CAPACITY
    b_counts = tl.zeros([BINS], tl.int32)
    for i_sub in range(SUB):
        o_t = i_first + i_sub * T + tl.arange(0, T)
        m_t = o_t < tokens
        b_score = read_scores(p_score, o_t, tokens)
        if HAS_EXCLUDED:
            b_score = tl.where(tl.load(p_excluded + o_row + o_t, mask=m_t, other=1) != 0, 0, b_score)
            tl.store(p_score + o_t, b_score.to(tl.uint8), mask=m_t)
        b_counts += tl.histogram(b_score, BINS)
    b_reach = tl.sum(b_counts, 0) - tl.cumsum(b_counts, 0) + b_counts
    o_bin = tl.arange(0, BINS)
    write_reach(p_reach, p_total, i_bh, i_tile, b_reach, o_bin, TILES, BINS)


@triton.jit
def write_reach(p_reach, p_total, i_bh, i_tile, b_reach, o_bin, TILES, BINS: tl.constexpr):
    """Stores how many tokens of the tile reach scores `o_bin`, and adds them to the sums over all tiles."""
    tl.store(p_reach + (i_bh * BINS + o_bin) * TILES + i_tile, b_reach)
    tl.atomic_add(p_total + i_bh * BINS + o_bin, b_reach, sem="relaxed")


@triton.jit(do_not_specialize=["START", "PAIRS", "TABLE", "FIELDS"])
def collision_kernel(
    p_signs, p_weights, p_table, p_zeros, p_excluded, p_tables, p_plan, p_fire, p_scores, p_reach, p_total, HEADS, START, PAIRS,
    CAPACITY, TILES, OWN_HEADS, TABLE, BYTES, FIELDS,
    BLOCK: tl.constexpr, S: tl.constexpr, READ: tl.constexpr, NW: tl.constexpr, BW: tl.constexpr,
    WORDS: tl.constexpr, LANES: tl.constexpr, T: tl.constexpr, SUB: tl.constexpr, HAS_EXCLUDED: tl.constexpr,
    BINS: tl.constexpr, SINKS: tl.constexpr, SEQUENCES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Part (tiles of T tokens, sequence and KV head): scores by table look-ups. Sign bytes are read READ at a time. SUB: see
    `tokens_of_part`.

    table int32 `[b, TABLE]`: the blocks of each sequence, see `kernels/blocks.py`; blocks have OWN_HEADS KV heads and stride
    BYTES in bytes. HEADS is smaller if each KV head is searched as a sequence of its own. zeros int32 `[bh]`: not 0 for heads
    that may have a key of zero norm; nothing writes it during the scan. SINKS: the first SINKS tokens of each sequence are
    not found.
    """
    b_parts, b_until = parts(p_plan, START, PAIRS, HEADS, FIELDS, SUB * T, SEQUENCES)
    for number in range(first_part(SEQUENCES), stop(b_until, SEQUENCES), step(SEQUENCES)):
        begin(PDL)
        i_tile, i_bh = part(number, b_parts, b_until, START, HEADS, SEQUENCES)
        i_b = i_bh // HEADS
        tokens = tl.load(p_plan + i_b * FIELDS)
        size = tokens_of_part(tokens, CAPACITY, T, SUB, SEQUENCES)
        i_h, p_own, i_first = i_bh % OWN_HEADS, p_table + i_bh // OWN_HEADS * TABLE, i_tile * size
        b_known = look_up(p_own, TABLE, i_first, BLOCK, SUB * T)
        if (tl.load(p_fire + i_b) != 0) & (i_first < tokens):
            p_entries = p_tables + i_bh * (WORDS * S * 256)
            p_score = p_scores + i_bh.to(tl.int64) * row_of_scores(CAPACITY)
            # A tile in several known blocks is scored block by block.
            PIECE: tl.constexpr = BLOCK if (T > BLOCK) & (len(b_known) > 0) else T
            o_w, o_in = tl.arange(0, BW), tl.arange(0, PIECE)
            for i_piece in tl.range(0, size // PIECE, disable_licm=True):  # that took more registers
                start = i_first + i_piece * PIECE
                m_w = (o_in < tokens - start)[:, None] & (o_w < NW)[None, :]
                b_block = blocks_of(b_known, p_own, TABLE, i_first, i_piece * PIECE, o_in[:, None], BLOCK, PIECE)
                p_sign = p_signs + begin_of(b_block, numbers_of(p_signs, BYTES), i_h, start, BLOCK, PIECE, NW)
                p_code = p_sign + rows_of(o_in, BLOCK, PIECE, NW)[:, None] + o_w[None, :]
                b_codes = tl.load(p_code, mask=m_w, other=0).to(tl.int32)
                b_score = tl.zeros([PIECE], tl.int32)
                for w in tl.static_range(WORDS):
                    b_sum = tl.zeros([PIECE, BW], tl.int32)
                    for i_byte in tl.static_range(READ):
                        o_entry = (w * S + o_w * READ + i_byte) * 256
                        b_byte = (b_codes >> (8 * i_byte)) & 255
                        b_sum += tl.load(p_entries + (o_entry[None, :] + b_byte), mask=(o_w < NW)[None, :], other=0)
                    b_lanes = tl.sum(b_sum, 1)
                    for lane in tl.static_range(4):
                        if w * 4 + lane < LANES:
                            b_score = tl.maximum(b_score, (b_lanes >> (8 * lane)) & 255)
                write_scores(p_score, b_score + 2, start + o_in, tokens, SINKS)
            tally(p_score, p_weights, p_own, p_zeros + i_bh, p_excluded, p_reach, p_total, i_first,
                  tl.minimum(tokens, i_first + size), i_bh, i_h, i_tile, CAPACITY, TILES, TABLE, BYTES, BLOCK, S, T, SUB,
                  HAS_EXCLUDED, BINS, SINKS)  # fmt: skip
    begin(PDL)  # programs without a part, too: this launch must end after the one before it
    end(PDL)

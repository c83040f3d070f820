"""Stage I by one-bit inner products on tensor cores: small integer query coordinates times the bits of the keys' sign bytes.

Bits are not unpacked. Bit j of every byte of a key is one row of an 8-bit matrix product; the other factor holds the query
coordinates 8 s + j. Eight bits make eight products. A row has 32 columns, so it holds two keys of 16 bytes or four of 8, and
the other factor is zero between different keys. A register holds four bytes, and one instruction masks a bit of each. The
masked bit has the value 1, 2, 4 or 8; the query is scaled to compensate, so that all products count 8 times. Bytes: S per token
and KV head, for all query heads of the group.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvrecall.core.triton import begin, end
from kvrecall.index.sphere.kernels.blocks import begin_of, blocks_of, look_up, numbers_of, rows_of
from kvrecall.index.sphere.kernels.scan import UNROLLED_SUMS, row_of_scores, tally, write_scores
from kvrecall.index.sphere.kernels.work import first_part, part, parts, step, stop, tokens_of_part


@triton.constexpr_function
def masking(j):
    """The instruction that takes bit j out of four bytes."""
    return f"and.b32 $0, $1, {0x01010101 << j};"


@triton.jit
def bits(b_codes, j: tl.constexpr, NATIVE: tl.constexpr):
    """Bit j < 4 of every byte, not shifted. NATIVE: four bytes at a time."""
    if NATIVE:
        b_codes = tl.inline_asm_elementwise(masking(j), "=r,r", [b_codes], dtype=tl.int8, is_pure=True, pack=4)
    else:
        b_codes = b_codes & (1 << j)
    return b_codes


@triton.jit
def upper(b_codes, NATIVE: tl.constexpr):
    """The upper four bits of every byte moved to the lower four; higher bits are ignored later."""
    if NATIVE:
        b_codes = tl.inline_asm_elementwise("shr.b32 $0, $1, 4;", "=r,r", [b_codes], dtype=tl.int8, is_pure=True, pack=4)
    else:
        b_codes = b_codes >> 4
    return b_codes


@triton.jit
def shift_spread(p_sums, blocks, o_lane, m_lane, spans, BLOCKS, BB: tl.constexpr):
    """Mean and variance of the shifts of lanes `o_lane`, from the sums `[LANES, BLOCKS, 2]` of `blocks` <= BB blocks."""
    PIECE: tl.constexpr = min(BB, UNROLLED_SUMS)
    b_sum, b_squares = tl.zeros(o_lane.shape, tl.float32), tl.zeros(o_lane.shape, tl.float32)
    for first in range(0, blocks, PIECE):
        o_b = first + tl.arange(0, PIECE)
        p_own = p_sums + (o_lane[:, None] * BLOCKS + o_b[None, :]) * 2
        m_own = m_lane[:, None] & (o_b < blocks)[None, :]
        b_sum += tl.sum(tl.load(p_own, mask=m_own, other=0.0), 1)
        b_squares += tl.sum(tl.load(p_own + 1, mask=m_own, other=0.0), 1)
    b_mean = b_sum / spans
    return b_mean, tl.maximum(b_squares / spans - b_mean * b_mean, 0.0)


@triton.jit
def of_columns(b_lanes, KEYS: tl.constexpr, BL: tl.constexpr):
    """Repeats numbers per lane `[BL]` for each key of a row, `[KEYS * BL]`."""
    return tl.reshape(tl.broadcast_to(b_lanes[None, :], [KEYS, BL]), [KEYS * BL])


@triton.constexpr_function
def exponent_of(UNIT, SHIFT):
    """Factor from a norm's code, in the upper bits of an fp32 number, to the norm in scores per quarter of a product."""
    return (127 + 4 - UNIT - 2 - SHIFT) << 23


_WHOLE, _WHOLE_BITS = tl.constexpr(1.5 * 2**23), tl.constexpr(0x4B400000)
"""An fp32 number and its bits. Adding an integer of 22 bits to the bits adds it to the number."""


@triton.jit(do_not_specialize=["START", "PAIRS", "TABLE", "FIELDS"])
def product_kernel(
    p_signs, p_norms, p_weights, p_table, p_zeros, p_excluded, p_rotated, p_shifts, p_sums, p_plan, p_fire, p_scores, p_reach,
    p_total, scale, units, HEADS, START, PAIRS, CAPACITY, TILES, SPANS, OWN_HEADS, TABLE, BYTES, FIELDS, BLOCK: tl.constexpr,
    D: tl.constexpr, S: tl.constexpr, BS: tl.constexpr, LANES: tl.constexpr, BL: tl.constexpr, T: tl.constexpr,
    SUB: tl.constexpr, STAGES: tl.constexpr, TALLY: tl.constexpr, HAS_EXCLUDED: tl.constexpr,
    BINS: tl.constexpr, OFFSET: tl.constexpr, SHIFT: tl.constexpr, TOP: tl.constexpr, NATIVE: tl.constexpr, NORMS: tl.constexpr,
    UNIT: tl.constexpr, PEAK: tl.constexpr, CENTRED: tl.constexpr, SPAN: tl.constexpr, BR: tl.constexpr, BB: tl.constexpr,
    MOST: tl.constexpr, SINKS: tl.constexpr, SEQUENCES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Part (tiles of TALLY tokens, sequence and KV head), T tokens at a time. BS, BL: S and LANES, padded. SUB: see
    `tokens_of_part`.

    scale: length of a rotated query `[BH, LANES, D]` in integers, which are clamped to PEAK. NORMS: multiplies products by
    the keys' norms, small floats in units of 2^-UNIT. CENTRED: adds <q, c> of each SPAN tokens, the shifts fp32
    `[BH, LANES, SPANS]` minus their mean, clamped to MOST, in units of products (units: of a query of length 1). `sums` has
    sums of BR shifts each, at most BB. SPAN divides T. BLOCK, BYTES, OWN_HEADS, table, zeros, SINKS: as in
    `collision_kernel`.
    """
    b_parts, b_until = parts(p_plan, START, PAIRS, HEADS, FIELDS, SUB * TALLY, SEQUENCES)
    for number in range(first_part(SEQUENCES), stop(b_until, SEQUENCES), step(SEQUENCES)):
        i_tile, i_bh = part(number, b_parts, b_until, START, HEADS, SEQUENCES)
        i_b, i_h, p_own = i_bh // HEADS, i_bh % OWN_HEADS, p_table + i_bh // OWN_HEADS * TABLE
        KEYS: tl.constexpr = 32 // BS  # in a row
        tokens = tl.load(p_plan + i_b * FIELDS)
        size = tokens_of_part(tokens, CAPACITY, TALLY, SUB, SEQUENCES)
        first = i_tile * size
        b_known = look_up(p_own, TABLE, first, BLOCK, SUB * TALLY)
        begin(PDL)
        if (tl.load(p_fire + i_b) != 0) & (first < tokens):
            o_k, o_n = tl.arange(0, 32), tl.arange(0, KEYS * BL)
            o_lane = o_n % BL
            m_query = ((o_k // BS)[:, None] == (o_n // BL)[None, :]) & (o_k % BS < S)[:, None] & (o_lane < LANES)[None, :]
            p_query = p_rotated + (i_bh * LANES + o_lane[None, :]) * D + (o_k % BS * 8)[:, None]
            b_exact, b_square = (), tl.zeros([32, KEYS * BL], tl.float32)
            for j in tl.static_range(8):
                b_x = tl.load(p_query + j, mask=m_query, other=0.0)
                b_square += b_x * b_x
                b_exact = b_exact + (b_x,)
            o_l = tl.arange(0, BL)
            if CENTRED:
                spans = tl.cdiv(tokens, SPAN)
                p_sum = p_sums + i_bh.to(tl.int64) * LANES * tl.cdiv(SPANS, BR) * 2
                b_mean, b_varied = shift_spread(p_sum, tl.cdiv(spans, BR), o_l, o_l < LANES, spans, tl.cdiv(SPANS, BR), BB)
                o_x = tl.arange(0, 8 * BS)
                m_x = (o_l < LANES)[:, None] & (o_x < D)[None, :]
                b_x = tl.load(p_rotated + (i_bh * LANES + o_l)[:, None] * D + o_x[None, :], mask=m_x, other=0.0)
                b_long = tl.sqrt(tl.sum(b_x * b_x, 1) + D * b_varied)
                b_unit = tl.where(b_long > 0, units / b_long, 0.0)
                b_norm = of_columns(b_long, KEYS, BL)
            else:
                b_norm = tl.sqrt(tl.sum(b_square, 0))
            b_factor = tl.where(b_norm > 0, scale / b_norm, 0.0)[None, :]
            b_all = tl.zeros([32, KEYS * BL], tl.int32)
            b_queries = ()
            for j in tl.static_range(8):
                b_q = tl.minimum(tl.maximum(tl.floor(b_exact[j] * b_factor + 0.5), -PEAK), PEAK).to(tl.int32)
                b_all += b_q
                b_queries = b_queries + ((b_q * (8 >> (j % 4))).to(tl.int8),)
            # A set bit counts +1, a clear bit -1: the product is twice the sum over set bits minus the sum over all bits.
            if CENTRED:
                b_start = (-(tl.sum(b_all, 0) << 2) + _WHOLE_BITS)[None, :]
            else:
                b_start = tl.where(o_lane < LANES, (OFFSET - tl.sum(b_all, 0)) << 2, -(1 << 24))[None, :]
            p_score = p_scores + i_bh.to(tl.int64) * row_of_scores(CAPACITY)
            for i_sub in tl.range(0, size // T, num_stages=STAGES, disable_licm=CENTRED):  # hoisting takes more registers
                start = first + i_sub * T
                o_key = (tl.arange(0, T // KEYS) * KEYS)[:, None] + (o_k // BS)[None, :]
                m_code = (o_key < tokens - start) & (o_k % BS < S)[None, :]
                b_block = blocks_of(b_known, p_own, TABLE, first, i_sub * T, o_key, BLOCK, T)
                p_sign = p_signs + begin_of(b_block, numbers_of(p_signs, BYTES), i_h, start, BLOCK, T, S)
                p_code = p_sign + rows_of(o_key, BLOCK, T, S) + (o_k % BS)[None, :]
                b_codes = tl.load(p_code, mask=m_code, other=0).to(tl.int8, bitcast=True)
                b_product = tl.zeros([T // KEYS, KEYS * BL], tl.int32) + b_start
                for j in tl.static_range(4):
                    b_product = tl.dot(bits(b_codes, j, NATIVE), b_queries[j], b_product, out_dtype=tl.int32)
                b_codes = upper(b_codes, NATIVE)
                for j in tl.static_range(4):
                    b_product = tl.dot(bits(b_codes, j, NATIVE), b_queries[4 + j], b_product, out_dtype=tl.int32)
                # The group's best product of each token, plus OFFSET; tokens form a matrix with rows of GROUPED.
                GROUPED: tl.constexpr = SPAN if CENTRED else KEYS
                o_group = tl.arange(0, T // GROUPED)
                o_in = (o_group * GROUPED)[:, None] + tl.arange(0, GROUPED)[None, :]
                o_t = start + o_in
                if NORMS:
                    b_block = blocks_of(b_known, p_own, TABLE, first, i_sub * T, o_in, BLOCK, T)
                    p_norm = p_norms + begin_of(b_block, numbers_of(p_norms, BYTES), i_h, start, BLOCK, T, 1)
                    b_code = tl.load(p_norm + rows_of(o_in, BLOCK, T, 1), mask=o_in < tokens - start, other=0).to(tl.int32)
                if CENTRED:
                    # Shifts differ between lanes. In fp32; exact for all sums within the range of scores.
                    o_s = start // SPAN + o_group
                    p_shift = p_shifts + (i_bh.to(tl.int64) * LANES + o_l[None, :]) * SPANS + o_s[:, None]
                    m_shift = (o_l < LANES)[None, :] & (o_s < spans)[:, None]
                    b_shift = (tl.load(p_shift, mask=m_shift, other=0.0) - b_mean[None, :]) * b_unit[None, :]
                    b_whole = tl.minimum(tl.maximum(tl.floor(b_shift + 0.5), -MOST), MOST) + OFFSET
                    b_whole = tl.where((o_l < LANES)[None, :], b_whole * (1.0 / (1 << SHIFT)), -1e30)
                    b_each = b_product.to(tl.float32, bitcast=True) - _WHOLE
                    b_each = tl.reshape(b_each, [T // GROUPED, GROUPED, BL])
                    b_scale = ((b_code << 19) + exponent_of(UNIT, SHIFT)).to(tl.float32, bitcast=True)
                    b_best = tl.max(b_each * b_scale[:, :, None] + b_whole[:, None, :], 2)
                    b_score = tl.minimum(tl.maximum(b_best, 0.0), TOP + 0.5).to(tl.int32) + 2
                else:
                    b_best = tl.max(tl.reshape(b_product, [T // GROUPED, GROUPED, BL]), 2) >> 2
                    if NORMS:
                        b_best = (((b_best - OFFSET) * (16 + (b_code & 15)) << (b_code >> 4)) >> UNIT) + OFFSET
                    b_score = tl.minimum(tl.maximum(b_best >> SHIFT, 0), TOP) + 2
                write_scores(p_score, b_score, o_t, tokens, SINKS)
            tally(p_score, p_weights, p_own, p_zeros + i_bh, p_excluded, p_reach, p_total, first,
                  tl.minimum(tokens, first + size), i_bh, i_h, i_tile, CAPACITY, TILES, TABLE, BYTES, BLOCK, S, TALLY,
                  SUB, HAS_EXCLUDED, BINS, SINKS)  # fmt: skip
    begin(PDL)  # programs without a part, too: this launch must end after the one before it
    end(PDL)

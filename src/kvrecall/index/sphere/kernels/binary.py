"""Stage I by one-bit inner products on binary tensor cores: sign bits of keys against bit planes of the queries.

A query coordinate is a five-bit integer in two's complement, so a query is five bit planes. One instruction counts the bits
that 16 keys share with 8 planes; three instructions give a thread all planes of one query head, for two keys. Counts are
accumulated on top of the bits of a power of two, so each sum is an fp32 number that already has its plane's weight. Four
additions, in an order without rounding, make the product. Four threads exchange values to find the group's largest score; then
each thread has two of a warp's 64 keys. Scores are counted by votes: thread l counts score l. Scores equal those of
`product_kernel`. Bytes: S per token and KV head, for all query heads of the group.
"""

# Loops over constants and tuples of values are resolved by the compiler.
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportArgumentType=false, reportOperatorIssue=false
# pyright: reportIndexIssue=false, reportAttributeAccessIssue=false, reportCallIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from kvrecall.core.triton import (
    begin,
    bits_of_warp,
    count_of_warp,
    end,
    equal,
    equal_64,
    exchanged,
    larger,
    masks_of,
    of_four,
    pair,
    product,
    sum_of_warp,
)
from kvrecall.index.sphere.kernels.blocks import begin_of, blocks_of, look_up, numbers_of, rows_of
from kvrecall.index.sphere.kernels.scan import UNROLLED_SUMS, row_of_scores, tally, write_reach
from kvrecall.index.sphere.kernels.work import first_part, part, parts, step, stop, tokens_of_part

CHUNK = tl.constexpr(64)
"""Tokens that a warp scores at once, four matrix products high."""


@triton.constexpr_function
def base(i):
    """The bits of 2^(24 + i), and of that plus 4,096 for i = 0: a count n added to them adds 2^(i + 1) n."""
    return ((127 + 24 + i) << 23) + (2048 if i == 0 else 0)


@triton.constexpr_function
def norm_exponent(UNIT, SHIFT):
    """Factor from a norm's code, in the upper half of an fp32 number, to the norm in scores."""
    return (127 + 4 - UNIT - SHIFT) << 7


@triton.jit
def read_keys(
    p_signs, p_norms, b_known, p_own, TABLE, BYTES, i_h, first, start, o_chunk, o_key, o_word, tokens,
    BLOCK: tl.constexpr, S: tl.constexpr, READ: tl.constexpr, T: tl.constexpr, STEPS: tl.constexpr, NORMS: tl.constexpr,
):  # fmt: skip
    """Words of eight keys per thread, key by key, and the norms of two. T: tokens of all warps, `start` of the tile the first.

    Thread 4 g + t has words t of keys g, 8 + g, 16 + g, ... of its warp's chunk, and norms of keys 8 t + g and 32 + 8 t + g.
    Bits after a key's own, and keys beyond the end, may have any value: queries are zero there.
    """
    W: tl.constexpr = S // READ
    b_words, b_codes = (), ()
    m_here = first + start + o_chunk < tokens
    for i in tl.static_range(8):
        if i == 0 or (BLOCK < CHUNK and i % 2 == 0):
            o_first = o_chunk + 8 * i
            b_block = blocks_of(b_known, p_own, TABLE, first, start, o_first, BLOCK, T)
            p_first = p_signs + begin_of(b_block, numbers_of(p_signs, BYTES), i_h, first + start, BLOCK, T, W)
            p_first += rows_of(o_first + o_key, BLOCK, T, W)
        after = 8 * (i % 2 if BLOCK < CHUNK else i)
        for s in tl.static_range(STEPS):
            b_word = o_word
            for j in tl.static_range(4 // READ):
                o_number = (4 * s + o_word) * (4 // READ) + j
                if W < STEPS * (16 // READ):
                    o_number = tl.minimum(o_number, W - 1)
                b_part = tl.load(p_first + (after * W + o_number), mask=m_here).to(tl.int32)
                if READ < 4:
                    b_part = (b_part & ((1 << 8 * READ) - 1)) << (8 * READ * j)
                b_word = b_part if j == 0 else b_word | b_part
            b_words = b_words + (b_word,)
    if NORMS:
        for i in tl.static_range(2):
            o_first = o_chunk + 32 * i + 8 * o_word
            b_block = blocks_of(b_known, p_own, TABLE, first, start, o_first, BLOCK, T)
            p_norm = p_norms + begin_of(b_block, numbers_of(p_norms, BYTES), i_h, first + start, BLOCK, T, 1)
            b_codes = b_codes + (tl.load(p_norm + rows_of(o_first + o_key, BLOCK, T, 1), mask=m_here).to(tl.int32),)
    return b_words, b_codes


@triton.jit
def norms_of(b_codes, UNIT: tl.constexpr, SHIFT: tl.constexpr):
    """fp32 factors of the products with keys g, 8 + g, ...: each of four threads has an eighth of them, twice.

    Codes become the upper bits of fp32 numbers; a word holds two codes.
    """
    b_two = (((b_codes[0] << 3) + norm_exponent(UNIT, SHIFT)) << 16) | ((b_codes[1] << 3) + norm_exponent(UNIT, SHIFT))
    b_all = (of_four(b_two, 0), of_four(b_two, 1), of_four(b_two, 2), of_four(b_two, 3))
    b_norms = ()
    for i in tl.static_range(4):
        b_norms = b_norms + ((b_all[i] & -65536).to(tl.float32, bitcast=True),)
    for i in tl.static_range(4):
        b_norms = b_norms + ((b_all[i] << 16).to(tl.float32, bitcast=True),)
    return b_norms


@triton.jit
def read_shifts(p_shift, o_token, o_word, tokens, SPANS, LANES: tl.constexpr, SPAN: tl.constexpr):
    """Shifts of the span of a chunk, fp32, one for each query head of a thread."""
    b_shifts = ()
    for w in tl.static_range((LANES + 3) // 4):
        o_head = 4 * w + o_word
        m_head = (o_head < LANES) & (o_token < tokens)
        b_shifts = b_shifts + (tl.load(p_shift + o_head.to(tl.int64) * SPANS + o_token // SPAN, mask=m_head, other=0.0),)
    return b_shifts


@triton.jit
def with_sums(b_mean, b_varied, p_own, m_head, blocks, b_lane, first, COUNT: tl.constexpr):
    """Adds sums of shifts and of their squares `[blocks, 2]`, COUNT from `first` on, per thread of a warp."""
    for i in tl.static_range((COUNT + 31) // 32):
        o_b = first + 32 * i + b_lane
        m_own = m_head & (o_b < blocks)
        b_mean += tl.load(p_own + o_b * 2, mask=m_own, other=0.0)
        b_varied += tl.load(p_own + o_b * 2 + 1, mask=m_own, other=0.0)
    return b_mean, b_varied


@triton.jit
def planes_of(
    p_rotated, p_sums, b_lane, b_warp, scale, units, spans, SUMS, D: tl.constexpr, LANES: tl.constexpr, STEPS: tl.constexpr,
    CENTRED: tl.constexpr, BR: tl.constexpr, BB: tl.constexpr, PEAK: tl.constexpr, FROM: tl.constexpr,
):  # fmt: skip
    """Bit planes of query head FROM + warp % 4, for other threads to read: thread 4 i + t of the warp has word t of plane i,
    int32.

    One block per step of 128 coordinates. Threads 20 to 22 of the first block have 2^24 - 4096 minus the query's sum, the mean
    of the shifts, and their unit, fp32.
    """
    b_head = FROM + b_warp % 4
    p_query, b_exact, b_square = p_rotated + b_head * D, (), tl.zeros(b_lane.shape, tl.float32)
    for w in tl.static_range(4 * STEPS):
        b_x = tl.load(p_query + 32 * w + b_lane, mask=(b_head < LANES) & (32 * w + b_lane < D), other=0.0)
        b_square += b_x * b_x
        b_exact = b_exact + (b_x,)
    b_mean, b_varied = tl.zeros(b_lane.shape, tl.float32), tl.zeros(b_lane.shape, tl.float32)
    if CENTRED:
        blocks, p_own = tl.cdiv(spans, BR), p_sums + b_head * SUMS * 2
        if BB <= UNROLLED_SUMS:
            b_mean, b_varied = with_sums(b_mean, b_varied, p_own, b_head < LANES, blocks, b_lane, 0, BB)
        else:  # unrolled, they would be thousands of loads
            for first in range(0, blocks, UNROLLED_SUMS):
                b_mean, b_varied = with_sums(b_mean, b_varied, p_own, b_head < LANES, blocks, b_lane, first, UNROLLED_SUMS)
        b_mean = sum_of_warp(b_mean) / spans
        b_varied = tl.maximum(sum_of_warp(b_varied) / spans - b_mean * b_mean, 0.0)
    b_long = tl.sqrt(sum_of_warp(b_square) + D * b_varied)
    b_factor = tl.where(b_long > 0, scale / b_long, 0.0)
    b_unit = tl.where(b_long > 0, units / b_long, 0.0)
    b_all, b_made = tl.zeros(b_lane.shape, tl.int32), ()
    for s in tl.static_range(STEPS):
        b_own = tl.zeros(b_lane.shape, tl.int32)
        for w in tl.static_range(4):
            b_x = b_exact[4 * s + w]
            b_q = tl.minimum(tl.maximum(tl.floor(b_x * b_factor + 0.5), -PEAK), PEAK).to(tl.int32)
            b_all += b_q
            b_planes = bits_of_warp(b_q)
            for i in tl.static_range(5):
                b_own = tl.where(b_lane == 4 * i + w, b_planes[i], b_own)
        b_made = b_made + (b_own,)
    b_rest = ((1 << 24) - 4096 - count_of_warp(b_all)).to(tl.float32)
    b_first = tl.where(b_lane == 20, b_rest.to(tl.int32, bitcast=True), b_made[0])
    b_first = tl.where(b_lane == 21, b_mean.to(tl.int32, bitcast=True), b_first)
    b_first = tl.where(b_lane == 22, b_unit.to(tl.int32, bitcast=True), b_first)
    return (b_first, b_made[1]) if STEPS == 2 else (b_first,)


@triton.jit
def weighted(b_0, b_1, b_2, b_3, b_4, b_rest):
    """The product, fp32, from the counts of five planes, each added to its `base`. rest: the remainder of the bases minus the
    query's sum.

    Partial sums are multiples of 2^(i + 1) below 2^(25 + i), where i is the lowest plane so far, and the rest is below 2^24 for
    any query. So nothing is rounded.
    """
    b_sum = b_3.to(tl.float32, bitcast=True) - b_4.to(tl.float32, bitcast=True)
    b_sum += b_2.to(tl.float32, bitcast=True)
    b_sum += b_1.to(tl.float32, bitcast=True)
    b_sum += b_0.to(tl.float32, bitcast=True)
    return b_sum + b_rest


@triton.jit
def whole_shift(b_shift, b_mean, b_unit, MOST: tl.constexpr, OFFSET: tl.constexpr, SHIFT: tl.constexpr):
    """A shift and OFFSET, in scores."""
    b_whole = tl.floor((b_shift - b_mean) * b_unit + 0.5)
    return (tl.minimum(tl.maximum(b_whole, -MOST), MOST) + OFFSET) * (1.0 / (1 << SHIFT))


@triton.jit
def best_of_four(b_0, b_1, b_2, b_3, b_lane):
    """The largest of four neighbouring threads for each of four pairs of keys; thread t keeps pair t."""
    m_upper, m_odd = (b_lane & 2) != 0, (b_lane & 1) != 0
    b_a = larger(tl.where(m_upper, b_2, b_0), exchanged(tl.where(m_upper, b_0, b_2), 2))
    b_b = larger(tl.where(m_upper, b_3, b_1), exchanged(tl.where(m_upper, b_1, b_3), 2))
    return larger(tl.where(m_odd, b_b, b_a), exchanged(tl.where(m_odd, b_a, b_b), 1))


@triton.jit
def half(b_pair, WHICH: tl.constexpr):
    """The integer part, int32, of the lower (0) or upper (1) of two fp16 >= 0."""
    return ((b_pair >> (16 * WHICH)) & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32).to(tl.int32)


@triton.jit(do_not_specialize=["START", "PAIRS", "TABLE", "FIELDS"])
def binary_kernel(
    p_signs, p_norms, p_weights, p_table, p_zeros, p_excluded, p_rotated, p_shifts, p_sums, p_plan, p_fire, p_scores, p_reach,
    p_total, scale, units, HEADS, START, PAIRS, CAPACITY, TILES, SPANS, OWN_HEADS, TABLE, BYTES, FIELDS, BLOCK: tl.constexpr,
    D: tl.constexpr, S: tl.constexpr, READ: tl.constexpr, STEPS: tl.constexpr, LANES: tl.constexpr, WARPS: tl.constexpr,
    TILE: tl.constexpr, SUB: tl.constexpr, HAS_EXCLUDED: tl.constexpr, BINS: tl.constexpr,
    OFFSET: tl.constexpr, SHIFT: tl.constexpr, TOP: tl.constexpr, NORMS: tl.constexpr, UNIT: tl.constexpr, PEAK: tl.constexpr,
    CENTRED: tl.constexpr, SPAN: tl.constexpr, BR: tl.constexpr, BB: tl.constexpr, MOST: tl.constexpr, SINKS: tl.constexpr,
    SEQUENCES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Part (tiles of TILE tokens, sequence and KV head), for WARPS warps, a multiple of four. Inputs, outputs and arguments are
    those of `product_kernel`.

    signs are read READ bytes at a time; a key has at most STEPS times 128 bits. The first keys of a tile do not depend on the
    queries, so they are loaded before the previous kernel has ended.
    """
    b_parts, b_until = parts(p_plan, START, PAIRS, HEADS, FIELDS, SUB * TILE, SEQUENCES)
    for number in range(first_part(SEQUENCES), stop(b_until, SEQUENCES), step(SEQUENCES)):
        i_tile, i_bh = part(number, b_parts, b_until, START, HEADS, SEQUENCES)
        i_b, i_h, p_own = i_bh // HEADS, i_bh % OWN_HEADS, p_table + i_bh // OWN_HEADS * TABLE
        T: tl.constexpr = CHUNK * WARPS
        GROUPS: tl.constexpr = (LANES + 3) // 4  # query heads per thread
        tokens = tl.load(p_plan + i_b * FIELDS)
        size = tokens_of_part(tokens, CAPACITY, TILE, SUB, SEQUENCES)
        first = i_tile * size
        b_known = look_up(p_own, TABLE, first, BLOCK, SUB * TILE)
        b_thread = tl.arange(0, 32 * WARPS)
        b_lane, b_warp = b_thread % 32, b_thread // 32
        o_chunk, o_key, o_word = b_warp * CHUNK, b_lane // 4, b_lane % 4
        b_words, b_codes = read_keys(p_signs, p_norms, b_known, p_own, TABLE, BYTES, i_h, first, 0, o_chunk, o_key, o_word,
                                     tokens, BLOCK, S, READ, T, STEPS, NORMS)  # fmt: skip
        begin(PDL)
        if (tl.load(p_fire + i_b) != 0) & (first < tokens):
            spans, last = tl.cdiv(tokens, SPAN), tl.minimum(tokens, first + size)
            SUMS = tl.cdiv(SPANS, BR)
            b_columns, b_rests, b_means, b_units = (), (), (), ()
            b_odd = o_key & 1
            for w in tl.static_range(GROUPS):
                b_made = planes_of(p_rotated + i_bh * LANES * D, p_sums + i_bh.to(tl.int64) * LANES * SUMS * 2, b_lane, b_warp,
                                   scale, units, spans, SUMS, D, LANES, STEPS, CENTRED, BR, BB, PEAK, 4 * w)  # fmt: skip
                for s in tl.static_range(STEPS):
                    for j in tl.static_range(3):  # column g of product j: plane 2 j + g % 2 of head g / 2
                        b_column = tl.gather(b_made[s], 32 * (o_key // 2) + 4 * (2 * j + b_odd) + o_word, 0)
                        b_columns = b_columns + (tl.where(b_odd == 0, b_column, 0) if j == 2 else b_column,)
                b_rests = b_rests + (tl.gather(b_made[0], 32 * o_word + 20, 0).to(tl.float32, bitcast=True),)
                if CENTRED:
                    b_means = b_means + (tl.gather(b_made[0], 32 * o_word + 21, 0).to(tl.float32, bitcast=True),)
                    b_units = b_units + (tl.gather(b_made[0], 32 * o_word + 22, 0).to(tl.float32, bitcast=True),)
            p_score = p_scores + i_bh.to(tl.int64) * row_of_scores(CAPACITY)
            p_pair = p_score.to(tl.pointer_type(tl.uint16))
            p_shift = p_shifts + i_bh.to(tl.int64) * LANES * SPANS
            b_masks = masks_of(b_lane)
            b_count, b_count_64 = tl.zeros(b_lane.shape, tl.int32), tl.zeros(b_lane.shape, tl.int32)
            if CENTRED:
                b_shifts = read_shifts(p_shift, first + o_chunk, o_word, tokens, SPANS, LANES, SPAN)
            for i_round in range(size // T):
                o_token = first + i_round * T + o_chunk
                # Loads for the next round are started early. After the last round nothing is loaded: `last` ends the tile.
                b_next, b_next_codes = read_keys(p_signs, p_norms, b_known, p_own, TABLE, BYTES, i_h, first, (i_round + 1) * T,
                                                 o_chunk, o_key, o_word, last, BLOCK, S, READ, T, STEPS, NORMS)  # fmt: skip
                b_wholes = ()
                for w in tl.static_range(GROUPS):
                    if CENTRED:
                        b_whole = whole_shift(b_shifts[w], b_means[w], b_units[w], MOST, OFFSET, SHIFT)
                    else:
                        b_whole = tl.full(b_lane.shape, OFFSET * (1.0 / (1 << SHIFT)), tl.float32)
                    b_wholes = b_wholes + (tl.where(4 * w + o_word < LANES, b_whole, -1e30),)
                if CENTRED:
                    b_shifts = read_shifts(p_shift, o_token + T, o_word, last, SPANS, LANES, SPAN)
                if NORMS:
                    b_norms = norms_of(b_codes, UNIT, SHIFT)
                b_pairs = ()
                for i in tl.static_range(4):
                    b_best, b_most = b_lane, b_lane  # no query head so far
                    for w in tl.static_range(GROUPS):
                        b_p = ()
                        for j in tl.static_range(3):
                            b_e = tl.full(b_lane.shape, base(2 * j), tl.int32)
                            b_o = tl.full(b_lane.shape, base(2 * j + 1), tl.int32)
                            b_sum = product(b_words[2 * i * STEPS], b_words[(2 * i + 1) * STEPS], b_columns[w * 3 * STEPS + j],
                                            (b_e, b_e), (b_o, b_o))  # fmt: skip
                            if STEPS == 2:
                                b_sum = product(b_words[2 * i * STEPS + 1], b_words[(2 * i + 1) * STEPS + 1],
                                                b_columns[(w * STEPS + 1) * 3 + j], (b_sum[0], b_sum[2]),
                                                (b_sum[1], b_sum[3]))  # fmt: skip
                            b_p = b_p + (b_sum[0], b_sum[1], b_sum[2], b_sum[3])
                        b_low = weighted(b_p[0], b_p[1], b_p[4], b_p[5], b_p[8], b_rests[w])
                        b_high = weighted(b_p[2], b_p[3], b_p[6], b_p[7], b_p[10], b_rests[w])
                        if NORMS:
                            b_low, b_high = b_low * b_norms[2 * i] + b_wholes[w], b_high * b_norms[2 * i + 1] + b_wholes[w]
                        else:
                            b_low = b_low * (1.0 / (1 << SHIFT)) + b_wholes[w]
                            b_high = b_high * (1.0 / (1 << SHIFT)) + b_wholes[w]
                        if w > 0:
                            b_low, b_high = tl.maximum(b_best, b_low), tl.maximum(b_most, b_high)
                        b_best, b_most = b_low, b_high
                    b_pairs = b_pairs + (pair(b_best, b_most),)
                b_pair = best_of_four(b_pairs[0], b_pairs[1], b_pairs[2], b_pairs[3], b_lane)
                # Keys 16 t + g of the chunk, and eight further on. Neighbours exchange one, so that each writes two in a row.
                o_low = o_token + 16 * o_word + o_key
                m_low, m_high = (o_low >= SINKS) & (o_low < tokens), (o_low + 8 >= SINKS) & (o_low + 8 < tokens)
                b_lower = tl.where(m_low, tl.minimum(half(b_pair, 0), TOP) + 2, 0)
                b_upper = tl.where(m_high, tl.minimum(half(b_pair, 1), TOP) + 2, 0)
                b_other = exchanged(tl.where(b_odd == 0, b_upper, b_lower), 4)
                b_two = tl.where(b_odd == 0, b_lower | (b_other << 8), b_other | (b_upper << 8))
                o_two = o_token + 16 * o_word + 8 * b_odd + (o_key & 6)
                tl.store(p_pair + o_two // 2, b_two.to(tl.uint16), mask=o_two // 16 < tl.cdiv(tokens, 16))
                if not HAS_EXCLUDED:
                    if BINS == 32:
                        b_count += equal(b_lower, b_masks) + equal(b_upper, b_masks)
                    else:
                        b_a, b_b = equal_64(b_lower, b_masks), equal_64(b_upper, b_masks)
                        b_count += b_a[0] + b_b[0]
                        b_count_64 += b_a[1] + b_b[1]
                b_words, b_codes = b_next, b_next_codes
            if HAS_EXCLUDED or tl.load(p_zeros + i_bh) != 0:
                tally(p_score, p_weights, p_own, p_zeros + i_bh, p_excluded, p_reach, p_total, first, last, i_bh, i_h, i_tile,
                      CAPACITY, TILES, TABLE, BYTES, BLOCK, S, TILE, SUB, HAS_EXCLUDED, BINS, SINKS)  # fmt: skip
            else:
                o_bin = tl.arange(0, 32)
                if BINS == 64:
                    b_bins = tl.sum(tl.reshape(b_count_64, [WARPS, 32]), 0)
                    above = tl.sum(b_bins, 0)
                    write_reach(p_reach, p_total, i_bh, i_tile, above - tl.cumsum(b_bins, 0) + b_bins, 32 + o_bin, TILES, BINS)
                else:
                    above = 0
                b_bins = tl.sum(tl.reshape(b_count, [WARPS, 32]), 0)
                b_reach = above + tl.sum(b_bins, 0) - tl.cumsum(b_bins, 0) + b_bins
                write_reach(p_reach, p_total, i_bh, i_tile, b_reach, o_bin, TILES, BINS)
    begin(PDL)  # programs without a part, too: this launch must end after the one before it
    end(PDL)

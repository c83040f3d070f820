"""Writes the candidates of stage I in ascending order.

Candidates are the `wanted` keys with the largest scores; among ties lower positions come first. The start of each tile's part
follows from the counts of the tiles before it, so the order does not depend on timing. Scores are handled four to a word, with
a third of the registers: programs mostly wait for memory, so as many as possible should run at the same time. Bytes: 1 per
token, 4 per candidate.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvrecall.core.triton import begin, end
from kvrecall.index.sphere.kernels.scan import row_of_scores
from kvrecall.index.sphere.kernels.work import first_part, part, parts, step, stop, tokens_of_part
from kvrecall.select.kernels import add_three

HIGH = tl.constexpr(-0x7F7F7F80)
"""The highest bit of each of four bytes, 0x80808080."""
ONES = tl.constexpr(0x01010101)


@triton.jit
def reaching(b_word, score):
    """The highest bit of each byte of `b_word` that is `score` or more, 0 <= score <= 255."""
    b_other = tl.zeros_like(b_word) + score * ONES
    b_difference = (b_word | HIGH) - (b_other & ~HIGH)
    return ((b_word & ~b_other) | (~(b_word ^ b_other) & b_difference)) & HIGH


@triton.jit
def count_and_most(a_count, a_most, b_count, b_most):
    """A sum and a maximum in one reduction."""
    return a_count + b_count, tl.maximum(a_most, b_most)


@triton.jit
def up_to(b_flag):
    """In each byte: how many bytes of the word, up to this one, have their highest bit set."""
    return ((b_flag >> 7) & ONES) * ONES


@triton.jit(do_not_specialize=["START", "PAIRS", "FIELDS"])
def compact_kernel(
    p_plan, p_fire, p_scores, p_reach, p_total, p_ids, HEADS, START, PAIRS, CAPACITY, TILES, ROOM, FIELDS, T: tl.constexpr,
    SUB: tl.constexpr, BT: tl.constexpr, BINS: tl.constexpr, SEQUENCES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Part (tiles, sequence and KV head): writes its share of the candidates ids[bh, ·], int32.

    scores: int32, four scores each; 0 beyond the last token, which is no candidate's score. Most tiles take all or none of the
    keys with the least score; only one tile takes some, and counts which.
    """
    b_parts, b_until = parts(p_plan, START, PAIRS, HEADS, FIELDS, SUB * T, SEQUENCES)
    for number in range(first_part(SEQUENCES), stop(b_until, SEQUENCES), step(SEQUENCES)):
        i_tile, i_bh = part(number, b_parts, b_until, START, HEADS, SEQUENCES)
        i_b = i_bh // HEADS
        tokens = tl.load(p_plan + i_b * FIELDS)
        wanted = tl.load(p_plan + i_b * FIELDS + 1)
        size = tokens_of_part(tokens, CAPACITY, T, SUB, SEQUENCES)
        begin(PDL)
        if (tl.load(p_fire + i_b) != 0) & (i_tile * size < tokens):
            o_bin = tl.arange(0, BINS)
            b_total = tl.load(p_total + i_bh * BINS + o_bin)
            # Totals fall with the score: `enough` of them reach `wanted`, the next one is below.
            m_enough = b_total >= wanted
            enough, above = tl.reduce((m_enough.to(tl.int32), tl.where(m_enough, 0, b_total)), 0, count_and_most)
            least, room = enough - 1, wanted - above  # the least score of candidates, and how many with it
            o_tile = tl.arange(0, BT)
            p_least = p_reach + (i_bh * BINS + least) * TILES
            b_reach = tl.load(p_least + o_tile, mask=o_tile <= i_tile, other=0)
            b_above = tl.load(p_least + TILES + o_tile, mask=o_tile <= tl.where(least + 1 < BINS, i_tile, -1), other=0)
            m_here, b_equal = o_tile == i_tile, b_reach - b_above
            above_before, equal_before, equal_here = tl.reduce(
                (tl.where(m_here, 0, b_above), tl.where(m_here, 0, b_equal), tl.where(m_here, b_equal, 0)), 0, add_three
            )
            p_out = p_ids + i_bh.to(tl.int64) * ROOM + above_before + tl.minimum(equal_before, room)
            p_score = p_scores + i_bh.to(tl.int64) * (row_of_scores(CAPACITY) // 4)
            divided = (equal_before < room) & (equal_before + equal_here > room)
            cut = tl.where(equal_before + equal_here <= room, least, least + 1)
            for i_sub in range(size // T):
                o_w = (i_tile * size + i_sub * T) // 4 + tl.arange(0, T // 4)
                b_word = tl.load(p_score + o_w, mask=o_w // 4 < tl.cdiv(tokens, 16), other=0)
                b_keep = reaching(b_word, cut)
                if divided:
                    b_same = reaching(b_word, least) & ~b_keep
                    b_rank = up_to(b_same)
                    b_before = equal_before + tl.cumsum(b_rank >> 24, 0) - (b_rank >> 24)
                    for j in tl.static_range(4):
                        m_first = b_before + ((b_rank >> (8 * j)) & 255) <= room
                        b_keep = b_keep | ((((b_same >> (8 * j + 7)) & 1) * m_first.to(tl.int32)) << (8 * j + 7))
                    equal_before += tl.sum(b_rank >> 24, 0)
                b_rank = up_to(b_keep)
                b_count = b_rank >> 24
                b_end = tl.cumsum(b_count, 0)
                b_begin = b_end - b_count - 1
                for j in tl.static_range(4):
                    m_keep = ((b_keep >> (8 * j + 7)) & 1) == 1
                    tl.store(p_out + (b_begin + ((b_rank >> (8 * j)) & 255)), o_w * 4 + j, mask=m_keep)
                p_out += tl.max(b_end, 0)
    begin(PDL)  # programs without a part, too: this launch must end after the one before it
    end(PDL)

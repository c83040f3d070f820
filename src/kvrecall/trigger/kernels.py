"""When a captured step searches: decided by the device, so that one graph serves steps that search and steps that do not."""

from __future__ import annotations

import triton
import triton.language as tl

from kvrecall.core.triton import begin, end

UNKNOWN, MISSING = tl.constexpr(1), tl.constexpr(2)
"""Bits of a sequence's `fresh` flag: no query to compare with, so the trigger fires; nothing is held, so a search is due."""


@triton.jit
def head_queries(i_b, first, H, D: tl.constexpr, BD: tl.constexpr, BH: tl.constexpr):
    """Places `[BH, BD]` of the queries of heads first .. first + BH - 1 in `[B, H, D]`, and which of them exist."""
    o_h, o_d = first + tl.arange(0, BH), tl.arange(0, BD)
    return (i_b * H + o_h)[:, None] * D + o_d[None, :], (o_h < H)[:, None] & (o_d < D)[None, :]


@triton.jit
def cosines(b_q, b_p):
    """Cosines `[BH]` of the vectors in the rows of two fp32 matrices; 0 where one of them is 0."""
    b_size = tl.sqrt(tl.sum(b_q * b_q, 1)) * tl.sqrt(tl.sum(b_p * b_p, 1))
    return tl.where(b_size > 0, tl.sum(b_q * b_p, 1) / tl.where(b_size > 0, b_size, 1.0), 0.0)


@triton.jit
def trigger_kernel(
    p_queries, p_before, p_since, p_fresh, p_fire, p_searches, p_marks, p_ordinals, threshold, most, every, ORDINAL, TOKENS,
    D: tl.constexpr, BD: tl.constexpr, BH: tl.constexpr, H: tl.constexpr, WIDTH: tl.constexpr, SEMANTIC: tl.constexpr,
    LAST: tl.constexpr, MARKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (sequence): fire `[B, WIDTH]` = whether to search; counts searches.

    SEMANTIC (LouisKV section 4.1): the mean cosine of queries `[B, H, D]` and before fp32 `[B, H, D]`, the previous ones or
    (LAST) those that fired last, is below the threshold, or `most` steps have passed. Else every `every`-th step fires. since
    int32 `[B]`: steps since the last search, or all steps. MARKS: a step that fires marks its token, number ordinals[b *
    ORDINAL], in marks uint8 `[B, TOKENS]`: there a segment begins. BH heads are read at once: one by one, each would wait for
    the memory.
    """
    begin(PDL)
    i_b = tl.program_id(0)
    fresh, since = tl.load(p_fresh + i_b), tl.load(p_since + i_b)
    if SEMANTIC:
        b_sum = tl.zeros([BH], tl.float32)
        for first in tl.static_range(0, H, BH):
            o_q, m_q = head_queries(i_b, first, H, D, BD, BH)
            b_q = tl.load(p_queries + o_q, mask=m_q, other=0.0).to(tl.float32)
            b_sum += cosines(b_q, tl.load(p_before + o_q, mask=m_q, other=0.0))
            if not LAST:
                tl.debug_barrier()  # another thread may have read what this one writes
                tl.store(p_before + o_q, b_q, mask=m_q)
        since += 1
        fired = ((tl.sum(b_sum, 0) / H < threshold) | (since >= most) | ((fresh & UNKNOWN) != 0)).to(tl.int32)
        tl.store(p_since + i_b, tl.where(fired != 0, 0, since))
        if LAST:
            tl.debug_barrier()
            for first in tl.static_range(0, H, BH):
                o_q, m_q = head_queries(i_b, first, H, D, BD, BH)
                b_q = tl.load(p_queries + o_q, mask=m_q, other=0.0).to(tl.float32)
                tl.store(p_before + o_q, b_q, mask=m_q & (fired != 0))
    else:
        fired = (since % every == 0).to(tl.int32)
        tl.store(p_since + i_b, since + 1)
    search = tl.where((fresh & MISSING) != 0, 1, fired)
    tl.store(p_fresh + i_b, 0)
    for i in tl.static_range(WIDTH):
        tl.store(p_fire + i_b * WIDTH + i, search)
    tl.store(p_searches + i_b, tl.load(p_searches + i_b) + search)
    if MARKS:
        ordinal = tl.load(p_ordinals + i_b * ORDINAL).to(tl.int64)
        tl.store(p_marks + i_b * TOKENS + ordinal, 1, mask=fired != 0)
    end(PDL)


@triton.jit
def turned_kernel(p_queries, p_before, p_fresh, p_fire, threshold, D: tl.constexpr, BD: tl.constexpr, BG: tl.constexpr,
                  G: tl.constexpr, HEADS: tl.constexpr):  # fmt: skip
    """Program (sequence): fire `[B, HEADS]` = whether the queries `[B, HEADS, G, D]` of a KV head have turned away from those
    of the step before (FreeKV): their mean cosine is below the threshold. Remembers the queries in `before`, of their dtype.
    The G <= BG queries of a group are read at once.

    It comes after kernels of two streams, which no dependent launch allows.
    """
    i_b = tl.program_id(0)
    fresh = tl.load(p_fresh + i_b)
    for h in tl.static_range(HEADS):
        o_q, m_q = head_queries(i_b * HEADS + h, 0, G, D, BD, BG)
        b_q = tl.load(p_queries + o_q, mask=m_q, other=0.0)
        b_p = tl.load(p_before + o_q, mask=m_q, other=0.0)
        turned = tl.sum(cosines(b_q.to(tl.float32), b_p.to(tl.float32)), 0) / G < threshold
        tl.debug_barrier()  # another thread may have read what this one writes
        tl.store(p_before + o_q, b_q, mask=m_q)
        tl.store(p_fire + i_b * HEADS + h, (turned | ((fresh & UNKNOWN) != 0)).to(tl.int32))
    tl.store(p_fresh + i_b, 0)

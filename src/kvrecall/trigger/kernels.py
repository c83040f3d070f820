"""When a captured step searches: decided by the device, so that one graph serves steps that search and steps that do not."""

from __future__ import annotations

import triton
import triton.language as tl

from kvrecall.core.pdl import begin, end

UNKNOWN, MISSING = tl.constexpr(1), tl.constexpr(2)
"""Bits of a sequence's `fresh` flag: no query to compare with, so the trigger fires; nothing is held, so a search is due."""


@triton.jit
def cosine(p_queries, p_before, o_q, m_d):
    """Cosine of the vectors at p_queries + o_q and p_before + o_q; 0 where one of them is 0."""
    b_q = tl.load(p_queries + o_q, mask=m_d, other=0.0).to(tl.float32)
    b_p = tl.load(p_before + o_q, mask=m_d, other=0.0).to(tl.float32)
    size = tl.sqrt(tl.sum(b_q * b_q, 0)) * tl.sqrt(tl.sum(b_p * b_p, 0))
    return tl.where(size > 0, tl.sum(b_q * b_p, 0) / tl.where(size > 0, size, 1.0), 0.0)


@triton.jit
def trigger_kernel(
    p_queries, p_before, p_since, p_fresh, p_fire, p_searches, p_marks, p_ordinals, threshold, most, every, ORDINAL, TOKENS,
    D: tl.constexpr, BD: tl.constexpr, H: tl.constexpr, WIDTH: tl.constexpr, SEMANTIC: tl.constexpr, LAST: tl.constexpr,
    MARKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (sequence): fire `[B, WIDTH]` = whether to search; counts searches.

    SEMANTIC (LouisKV section 4.1): the mean cosine of queries `[B, H, D]` and before fp32 `[B, H, D]`, the previous ones or
    (LAST) those that fired last, is below the threshold, or `most` steps have passed. Else every `every`-th step fires. since
    int32 `[B]`: steps since the last search, or all steps. MARKS: a step that fires marks its token, number ordinals[b *
    ORDINAL], in marks uint8 `[B, TOKENS]`: there a segment begins.
    """
    begin(PDL)
    i_b = tl.program_id(0)
    fresh, since = tl.load(p_fresh + i_b), tl.load(p_since + i_b)
    o_d = tl.arange(0, BD)
    m_d = o_d < D
    if SEMANTIC:
        mean = 0.0
        for h in range(H):
            mean += cosine(p_queries, p_before, (i_b * H + h) * D + o_d, m_d)
        since += 1
        fired = ((mean / H < threshold) | (since >= most) | ((fresh & UNKNOWN) != 0)).to(tl.int32)
        tl.store(p_since + i_b, tl.where(fired != 0, 0, since))
        if (fired != 0) | (not LAST):
            for h in range(H):
                o_q = (i_b * H + h) * D + o_d
                tl.store(p_before + o_q, tl.load(p_queries + o_q, mask=m_d, other=0.0).to(tl.float32), mask=m_d)
    else:
        fired = (since % every == 0).to(tl.int32)
        tl.store(p_since + i_b, since + 1)
    search = tl.where((fresh & MISSING) != 0, 1, fired)
    tl.store(p_fresh + i_b, 0)
    for i in range(WIDTH):
        tl.store(p_fire + i_b * WIDTH + i, search)
    tl.store(p_searches + i_b, tl.load(p_searches + i_b) + search)
    if MARKS:
        ordinal = tl.load(p_ordinals + i_b * ORDINAL).to(tl.int64)
        tl.store(p_marks + i_b * TOKENS + ordinal, 1, mask=fired != 0)
    end(PDL)


@triton.jit
def turned_kernel(p_queries, p_before, p_fresh, p_fire, threshold, D: tl.constexpr, BD: tl.constexpr, G: tl.constexpr,
                  HEADS: tl.constexpr):  # fmt: skip
    """Program (sequence): fire `[B, HEADS]` = whether the queries `[B, HEADS, G, D]` of a KV head have turned away from those
    of the step before (FreeKV): their mean cosine is below the threshold. Remembers the queries in `before`, of their dtype.

    It comes after kernels of two streams, which no dependent launch allows.
    """
    i_b = tl.program_id(0)
    fresh = tl.load(p_fresh + i_b)
    o_d = tl.arange(0, BD)
    m_d = o_d < D
    for h in range(HEADS):
        mean = 0.0
        for g in range(G):
            o_q = ((i_b * HEADS + h) * G + g) * D + o_d
            mean += cosine(p_queries, p_before, o_q, m_d)
            tl.store(p_before + o_q, tl.load(p_queries + o_q, mask=m_d, other=0.0), mask=m_d)
        turned = (mean / G < threshold) | ((fresh & UNKNOWN) != 0)
        tl.store(p_fire + i_b * HEADS + h, turned.to(tl.int32))
    tl.store(p_fresh + i_b, 0)

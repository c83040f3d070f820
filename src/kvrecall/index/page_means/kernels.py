"""Attention of a captured step to page means.

Bytes per KV head and step: 4 D per page in 16-bit types, and the ids of the selection. Nothing is fetched.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvrecall.attend.kernels import add_tile, empty_part, store_part
from kvrecall.core.launch import next_power_of_2
from kvrecall.core.triton import begin, capped, end

_MOST_PAGES, _FEWEST_PAGES, _TILE_BYTES = 64, 16, 16_384


def pages_at_once(dim: int, itemsize: int) -> int:
    """Pages per tile of `attend_pages`: two tiles of keys and values lie in registers."""
    return max(_FEWEST_PAGES, min(_MOST_PAGES, _TILE_BYTES // (next_power_of_2(dim) * itemsize)))


@triton.jit
def rows_of(p_means, b_block, o_p, pages, NUMBERS, PAGE, SINKS, BLOCK: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    """Mean keys and values `[W, BD]` of pages o_p `[W]` in their blocks b_block; zeros where there is none: behind `pages`,
    and where all tokens are sinks. Other arguments as in `attend_pages`."""
    o_d = tl.arange(0, BD)
    o_row = o_p - ((o_p + 1) * PAGE - 1) // BLOCK * BLOCK // PAGE
    m_row = ((o_p < pages) & ((o_p + 1) * PAGE > SINKS))[:, None] & (o_d < D)[None, :]
    p_row = p_means + (b_block.to(tl.int64) * NUMBERS + o_row * (2 * D))[:, None] + o_d[None, :]
    return tl.load(p_row, mask=m_row, other=0.0), tl.load(p_row + D, mask=m_row, other=0.0)


@triton.jit
def blocks_of(p_table, o_p, pages, PAGE, BLOCK: tl.constexpr):
    """The blocks of pages o_p `[W]`, int32: a page lies in the block of its last token. Entries for o_p >= pages are not
    read."""
    return tl.load(p_table + ((o_p + 1) * PAGE - 1) // BLOCK, mask=o_p < pages, other=0)


@triton.jit
def attend_pages(
    p_query, p_means, p_table, p_ids, p_out, p_lse, i_share, o_part, pages, scaling, softcap, NUMBERS, K, PAGE, SINKS,
    SHARES, PARTS,
    BLOCK: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, G: tl.constexpr, W: tl.constexpr, BK: tl.constexpr,
    CAP: tl.constexpr,
):  # fmt: skip
    """One share in SHARES of attention of G queries to the means of one sequence and KV head, tiles of W pages: part o_part of
    out `[G, PARTS, D]`, lse `[G, PARTS]`, fp32.

    means: this head's, in the cache's dtype, in blocks of BLOCK tokens that are NUMBERS elements apart; see
    `index.table.RowLayout`. table: the sequence's blocks; the first `pages` pages are valid. A page of PAGE tokens counts with
    log m on its logit, where m tokens are neither among the first SINKS tokens nor in ids `[K]`. While a tile is attended to,
    the rows of the next one are read, and the blocks of the one after it are looked up.
    """
    BG: tl.constexpr = max(16, triton.next_power_of_2(G))
    STEP = SHARES * W
    IDS: tl.constexpr = max(64, BK)
    o_g, o_d, o_w = tl.arange(0, BG), tl.arange(0, BD), tl.arange(0, W)
    m_q = (o_g < G)[:, None] & (o_d < D)[None, :]
    b_q = tl.load(p_query + o_g[:, None] * D + o_d[None, :], mask=m_q, other=0.0).to(p_means.dtype.element_ty)
    b_id = tl.load(p_ids + tl.arange(0, IDS), mask=tl.arange(0, IDS) < K, other=-1)
    b_chosen = tl.where(b_id >= 0, b_id // PAGE, -1)
    b_peak = tl.full([BG], float("-inf"), tl.float32)
    b_total, b_sum = tl.zeros([BG], tl.float32), tl.zeros([BG, BD], tl.float32)
    first = i_share * W
    o_p = first + o_w
    b_k, b_v = rows_of(p_means, blocks_of(p_table, o_p, pages, PAGE, BLOCK), o_p, pages, NUMBERS, PAGE, SINKS, BLOCK, D, BD)
    b_block = blocks_of(p_table, o_p + STEP, pages, PAGE, BLOCK)
    for _ in range(tl.cdiv(pages, STEP)):
        b_k_next, b_v_next = rows_of(p_means, b_block, o_p + STEP, pages, NUMBERS, PAGE, SINKS, BLOCK, D, BD)
        b_block = blocks_of(p_table, o_p + 2 * STEP, pages, PAGE, BLOCK)
        b_place = b_chosen - first
        m_here = (b_chosen >= 0) & (b_place >= 0) & (b_place < W)
        b_found = tl.histogram(tl.where(m_here, b_place, 0), W, mask=m_here)
        b_left = PAGE - tl.minimum(tl.maximum(SINKS - o_p * PAGE, 0), PAGE) - b_found
        m_p = (o_p < pages) & (b_left > 0)
        b_logit = tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * scaling  # [BG, W]
        if CAP:
            b_logit = capped(b_logit, softcap)
        b_logit = tl.where(m_p[None, :], b_logit + tl.log(tl.where(m_p, b_left, 1).to(tl.float32))[None, :], float("-inf"))
        b_peak, b_total, b_sum = add_tile(b_logit, b_v, b_peak, b_total, b_sum)
        b_k, b_v, o_p, first = b_k_next, b_v_next, o_p + STEP, first + STEP
    store_part(p_out, p_lse, o_part, b_peak, b_total, b_sum, D, BD, G, PARTS)


@triton.jit(do_not_specialize=["START", "TABLE", "SHARES", "FIRST", "PARTS"])
def page_means_kernel(
    p_queries, p_means, p_table, p_pages, p_ids, p_out, p_lse, scaling, softcap, HEADS, START, TABLE, NUMBERS, ROWS, K, PAGE,
    SINKS, SHARES, FIRST, PARTS,
    BLOCK: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, G: tl.constexpr, W: tl.constexpr, BK: tl.constexpr,
    CAP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (sequence and KV head, share): part FIRST + share of PARTS; see `attend_pages`. A share without pages, as most of
    a short sequence's are, writes its lse alone.

    means in blocks `[HEADS, ROWS, 2 D]`. table int32 `[B, TABLE]`: the blocks of each sequence; its first pages[b] pages are
    valid. ids `[BH, K]`. The first SINKS tokens are in no mean.

    Nothing here depends on the launch before this one, which attends to the selected rows. So that one lets this one go as soon
    as the ids are there, and both run at the same time.
    """
    i_bh, i_share = tl.program_id(0) // SHARES + START, tl.program_id(0) % SHARES
    i_b, i_kv, o_part = i_bh // HEADS, i_bh % HEADS, i_bh.to(tl.int64) * G * PARTS
    pages = tl.load(p_pages + i_b)
    if i_share * W < pages:
        attend_pages(p_queries + i_bh.to(tl.int64) * G * D, p_means + i_kv * ROWS * (2 * D), p_table + i_b * TABLE,
                     p_ids + i_bh.to(tl.int64) * K, p_out + o_part * D, p_lse + o_part, i_share, FIRST + i_share, pages,
                     scaling, softcap, NUMBERS, K, PAGE, SINKS, SHARES, PARTS, BLOCK, D, BD, G, W, BK, CAP)  # fmt: skip
    else:
        empty_part(p_lse + o_part, FIRST + i_share, G, PARTS)
    begin(PDL)  # so that this launch ends behind the one before it
    end(PDL)

"""Kernels over blocks: the plan of a pass, and a layer's work besides the search.

The device reads tokens and block tables of a pass itself, because with asynchronous scheduling the host only knows bounds.
Lengths include the new tokens. A row of the batch may decode several tokens, a draft's: each has a row of the plan.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from kvrecall.attend.kernels import (
    add_tile,
    attend_block,
    computed,
    empty_part,
    flag_odd,
    readers_first,
    store_new,
    store_part,
)
from kvrecall.attend.row_cache import cached_rows
from kvrecall.cache.paged_rows import Fresh, head_rows, load_part, run_start, store_run, window_place
from kvrecall.core.triton import begin, capped, e4m3, end, far_offset


@triton.jit
def window_start(length, LOCAL, WHOLE):
    """As `plan.window_start`."""
    return tl.where(length < WHOLE, 0, tl.maximum(length - LOCAL, 0))


@triton.jit(do_not_specialize=["DECODES", "TABLE", "BLOCKS", "NOW"])
def plan_kernel(
    p_begins, p_lengths, p_table, p_candidates, p_of_block, p_now, p_plan, p_fire, p_pages, p_counts, p_decoded, DECODES,
    TABLE, DECODED, LOCAL, WHOLE, SINKS, K, MEAN_TOKENS, BLOCKS, NOW,
    BLOCK: tl.constexpr, SEARCH: tl.constexpr, STRIDE: tl.constexpr, TOKENS: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Program (row of the batch): writes a plan row for each token that the row decodes, and whether it searches.

    begins int32 `[b + 1]`, lengths int32 `[b]`, table int32 `[b, TABLE]`: vLLM's; the first DECODES rows decode up to TOKENS
    tokens each. candidates int32: by tokens of the zone. of_block int32 `[BLOCKS]`: places of sequences by the block of their
    first token here, which no other sequence has (`Places`). now int64 `[1]` becomes NOW, the number of the pass. plan int32
    `[·, STRIDE]`, by number of the token in the pass: SEARCH numbers of the search, then those of `plan.OWN_FIELDS`; zeros in
    the rows up to b * TOKENS that no token has. pages int32: whole pages of MEAN_TOKENS tokens in the zone that a token
    searches, 0 if it does not. decoded int32 `[·, DECODED]`, if TOKENS > 1: the blocks of each token's sequence. counts int64
    `[3]`: adds searches, searched tokens and selected rows.
    """
    i_b = tl.program_id(0)
    if i_b == 0:
        tl.store(p_now, NOW)
    begin, length = tl.load(p_begins + i_b), tl.load(p_lengths + i_b)
    count = tl.load(p_begins + i_b + 1) - begin
    decodes = (i_b < DECODES) & (count > 0) & (count <= TOKENS) & (length > 0)
    p_own, past = p_table + i_b.to(tl.int64) * TABLE, length - count
    block = tl.load(p_own + tl.maximum(past, 0) // BLOCK, mask=decodes, other=0)
    place = tl.load(p_of_block + block, mask=decodes & (block < BLOCKS), other=-1)
    searches_all, among_all, found_all = tl.full([], 0, tl.int64), tl.full([], 0, tl.int64), tl.full([], 0, tl.int64)
    for i_t in range(tl.where(decodes, count, 0)):
        i_row, own = begin + i_t, past + i_t + 1
        p_row, tokens = p_plan + i_row * STRIDE, window_start(own, LOCAL, WHOLE)
        searches = tokens > SINKS
        tl.store(p_row, tl.where(searches, tokens, 0))
        tl.store(p_row + 1, tl.where(searches, tl.minimum(tl.load(p_candidates + tokens), tokens - SINKS), 0))
        tl.store(p_row + SEARCH, own)
        tl.store(p_row + SEARCH + 1, i_b)
        tl.store(p_row + SEARCH + 2, i_t)
        tl.store(p_row + SEARCH + 3, place)
        tl.store(p_row + SEARCH + 4, tokens)
        tl.store(p_fire + i_row, searches.to(tl.int32))
        tl.store(p_pages + i_row, tl.where(searches, tokens // MEAN_TOKENS, 0))
        among = tl.where(searches, tokens - SINKS, 0).to(tl.int64)
        searches_all += searches.to(tl.int64)
        among_all += among
        found_all += tl.minimum(among, K)
        if TOKENS > 1:
            last = tl.cdiv(length, BLOCK)
            for i in range(0, last, T):
                o_place = i + tl.arange(0, T)
                b_block = tl.load(p_own + o_place, mask=o_place < last, other=0)
                tl.store(p_decoded + i_row.to(tl.int64) * DECODED + o_place, b_block, mask=o_place < tl.minimum(last, DECODED))
    for i_row in range(tl.maximum(tl.load(p_begins + tl.num_programs(0)), i_b * TOKENS), (i_b + 1) * TOKENS):
        p_row = p_plan + i_row * STRIDE
        tl.store(p_row, 0)
        tl.store(p_row + 1, 0)
        tl.store(p_row + SEARCH, 0)
        tl.store(p_row + SEARCH + 1, i_b)
        tl.store(p_row + SEARCH + 2, 0)
        tl.store(p_row + SEARCH + 3, -1)
        tl.store(p_row + SEARCH + 4, 0)
        tl.store(p_fire + i_row, 0)
        tl.store(p_pages + i_row, 0)
    tl.atomic_add(p_counts, searches_all, mask=searches_all > 0, sem="relaxed")
    tl.atomic_add(p_counts + 1, among_all, mask=searches_all > 0, sem="relaxed")
    tl.atomic_add(p_counts + 2, found_all, mask=searches_all > 0, sem="relaxed")


@triton.jit
def take_mean(
    rows, p_mean, first, TOKENS, SINKS, BLOCK: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, W: tl.constexpr
):  # fmt: skip
    """Stores mean `[2, D]` of keys and values at positions first .. first + TOKENS - 1, without sinks; W rows at a time, fp32
    sums. Stores nothing if all are sinks. rows: a `HeadRows`."""
    o_d = tl.arange(0, BD)
    b_k, b_v = tl.zeros([BD], tl.float32), tl.zeros([BD], tl.float32)
    begins = tl.maximum(first, SINKS)
    for i in range(begins, first + TOKENS, W):
        o_r = i + tl.arange(0, W)
        m_r = o_r < first + TOKENS
        b_k += tl.sum(load_part(rows, o_r, m_r, False, BLOCK, D, BD).to(tl.float32), 0)
        b_v += tl.sum(load_part(rows, o_r, m_r, True, BLOCK, D, BD).to(tl.float32), 0)
    count = first + TOKENS - begins
    if count > 0:
        tl.store(p_mean + o_d, b_k / count, mask=o_d < D)
        tl.store(p_mean + D + o_d, b_v / count, mask=o_d < D)


@triton.jit
def attend_more(b_q, b_k, b_v, m_r, b_peak, b_total, b_sum, scaling, softcap, CAP: tl.constexpr):
    """Adds rows b_k, b_v `[R, BD]` to an attention of queries `[BG, BD]`, see `add_tile`."""
    b_k, b_v = computed(b_k, b_q), computed(b_v, b_q)
    b_logit = tl.dot(b_q.to(b_k.dtype), tl.trans(b_k), input_precision="ieee") * scaling  # [BG, R]
    if CAP:
        b_logit = capped(b_logit, softcap)
    return add_tile(tl.where(m_r[None, :], b_logit, float("-inf")), b_v, b_peak, b_total, b_sum)


class Plan(NamedTuple):
    """Of the decoded tokens of a launch: rows int32 `[n, STRIDE]` and fire int32 `[n]` (`plan_kernel`). bad int32 `[n]` becomes
    1 for a token that is not finite. read int64 `[n]` counts selected rows that were read from the host."""

    rows: Any
    fire: Any
    bad: Any
    read: Any


class Parts(NamedTuple):
    """Parts of the merge: out fp32 `[n, H_q, COUNT, D]`, lse fp32 `[n, H_q, COUNT]`."""

    out: Any
    lse: Any
    COUNT: Any


class PageMeans(NamedTuple):
    """Means of TOKENS tokens each, `[HEADS, BLOCK / TOKENS, 2 D]` in blocks with stride STRIDE in elements."""

    rows: Any
    STRIDE: Any
    TOKENS: Any


@triton.jit
def share_of(start, stop, i_share, SHARES, W: tl.constexpr):
    """The first position of a share of positions start .. stop - 1, in whole tiles of W, and the one behind its last."""
    each = tl.cdiv(tl.cdiv(stop - start, W), SHARES) * W
    first = start + i_share * each
    return first, tl.minimum(first + each, stop)


@triton.jit
def attend_recent(
    p_query, fresh, i_b, i_kv, window, p_pages, p_bad, parts, o_part, i_part, first, stop, length, before, scaling, softcap,
    D: tl.constexpr, BD: tl.constexpr, G: tl.constexpr, W: tl.constexpr, CAP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """G queries attend to positions first .. stop - 1 of the window, W at a time, as part i_part of the merge.

    i_b: the token in the launch, whose sequence has `length` tokens with it, and `before` others before it in the pass. Tokens
    of the pass are read from where the model put them. The share that ends with the new token stores it in the window.
    """
    BG: tl.constexpr = max(16, triton.next_power_of_2(G))
    o_g, o_d = tl.arange(0, BG), tl.arange(0, BD)
    m_d = (o_d < D)[None, :]
    m_q = (o_g < G)[:, None] & m_d
    b_q = tl.load(p_query + o_g[:, None] * D + o_d[None, :], mask=m_q, other=0.0)
    newest, new = length - 1, length - 1 - before
    p_key = fresh.k + i_b.to(tl.int64) * fresh.K_TOKEN + i_kv * D
    p_value = fresh.v + i_b.to(tl.int64) * fresh.V_TOKEN + i_kv * D
    b_peak = tl.full([BG], float("-inf"), tl.float32)
    b_total, b_sum = tl.zeros([BG], tl.float32), tl.zeros([BG, BD], tl.float32)
    begins = first + tl.maximum(tl.minimum(stop, new) - first, 0) // W * W  # of the tiles with tokens of this pass
    for i in tl.range(first, begins, W, num_stages=STAGES):
        o_r = i + tl.arange(0, W)
        m_r = o_r < begins
        p_row = window.rows + window_place(window, p_pages, o_r, i_kv, m_r)[:, None] + o_d[None, :]
        b_k = tl.load(p_row, mask=m_r[:, None] & m_d, other=0.0)
        b_v = tl.load(p_row + D, mask=m_r[:, None] & m_d, other=0.0)
        b_peak, b_total, b_sum = attend_more(b_q, b_k, b_v, m_r, b_peak, b_total, b_sum, scaling, softcap, CAP)
    for i in tl.range(begins, stop, W, num_stages=1):
        o_r = i + tl.arange(0, W)
        m_r, m_old, m_new = o_r < stop, o_r < tl.minimum(stop, new), (o_r < stop) & (o_r >= new)
        p_row = window.rows + window_place(window, p_pages, o_r, i_kv, m_old)[:, None] + o_d[None, :]
        o_new = tl.where(m_new, o_r - newest, 0).to(tl.int64)[:, None]
        m_old, m_now = m_old[:, None] & m_d, m_new[:, None] & m_d
        b_k, b_v = tl.load(p_row, mask=m_old, other=0.0), tl.load(p_row + D, mask=m_old, other=0.0)
        b_k = tl.where(m_now, tl.load(p_key + o_new * fresh.K_TOKEN + o_d[None, :], mask=m_now, other=0.0), b_k)
        b_v = tl.where(m_now, tl.load(p_value + o_new * fresh.V_TOKEN + o_d[None, :], mask=m_now, other=0.0), b_v)
        b_peak, b_total, b_sum = attend_more(b_q, b_k, b_v, m_r, b_peak, b_total, b_sum, scaling, softcap, CAP)
    store_part(parts.out + o_part * D, parts.lse + o_part, i_part, b_peak, b_total, b_sum, D, BD, G, parts.COUNT)
    if stop == length:
        store_new(p_key, p_value, window.rows + window_place(window, p_pages, newest, i_kv, length > 0), p_bad, D, BD)


@triton.jit(do_not_specialize=["SHARES", "FIRST"])
def window_kernel(
    p_queries, fresh, plan, window, parts, scaling, softcap, Q_TOKEN, HEADS, SHARES, FIRST,
    D: tl.constexpr, BD: tl.constexpr, G: tl.constexpr, W: tl.constexpr, SEARCH: tl.constexpr, STRIDE: tl.constexpr,
    CAP: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (token and KV head, share): attends to one share in SHARES of the window, W rows at a time, as part FIRST + share
    of the merge, and stores the new token in the window. For many sequences, whose programs fill a GPU.

    Arguments as in `paged_step_kernel`, which has a program for every W rows. Bytes: 4 D per row in 16-bit types.
    """
    begin(PDL)
    i_pair, i_share = tl.program_id(0) // SHARES, tl.program_id(0) % SHARES
    i_b, i_kv = i_pair // HEADS, i_pair % HEADS
    p_own, length = plan.rows + i_b * STRIDE + SEARCH, tl.load(plan.rows + i_b * STRIDE + SEARCH)
    p_pages = window.table + tl.load(p_own + 1).to(tl.int64) * window.TABLE
    first, stop = share_of(tl.load(p_own + 4), length, i_share, SHARES, W)
    o_part = i_pair.to(tl.int64) * G * parts.COUNT
    if first < stop:
        attend_recent(
            p_queries + i_b.to(tl.int64) * Q_TOKEN + i_kv * G * D, fresh, i_b, i_kv, window, p_pages, plan.bad + i_b, parts,
            o_part, FIRST + i_share, first, stop, length, tl.load(p_own + 2), scaling, softcap, D, BD, G, W, CAP, STAGES,
        )  # fmt: skip
    else:
        empty_part(parts.lse + o_part, FIRST + i_share, G, parts.COUNT)
    end(PDL)


@triton.jit
def keep_piece(
    rows, i_piece, newest, summary, means, SINKS, EVERY, PHASE, BLOCK: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    W: tl.constexpr, PIECES: tl.constexpr, MEANED: tl.constexpr, SUMMARISE: tl.constexpr,
):  # fmt: skip
    """One of PIECES of the work that keeps the new token, at position `newest`; arguments as in `paged_step_kernel`."""
    length = newest + 1
    if i_piece < PIECES - MEANED - 1:
        SUMMARISE(summary, i_piece, newest, rows, BLOCK, D, BD)
    elif i_piece < PIECES - 1:
        if MEANED:  # noqa: SIM102 - one is the compiler's
            if length % means.TOKENS == 0:
                p_mean = mean_place(means, rows.blocks, length - means.TOKENS, rows.i_kv, BLOCK, D)
                take_mean(rows, p_mean, length - means.TOKENS, means.TOKENS, SINKS, BLOCK, D, BD, W)
    elif run_start(length, PHASE, EVERY, BLOCK) == length:
        store_run(rows, run_start(newest, PHASE, EVERY, BLOCK), length, BLOCK, D, BD, W)


@triton.jit
def recent_kernel(
    fresh, plan, window, HEADS, D: tl.constexpr, BD: tl.constexpr, SEARCH: tl.constexpr, STRIDE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (token and KV head): stores a decoded token in the window's pages; arguments as in `paged_step_kernel`."""
    begin(PDL)
    i_b, i_kv = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    p_own, length = plan.rows + i_b * STRIDE + SEARCH, tl.load(plan.rows + i_b * STRIDE + SEARCH)
    if length > 0:
        p_pages = window.table + tl.load(p_own + 1).to(tl.int64) * window.TABLE
        p_here = window.rows + window_place(window, p_pages, length - 1, i_kv, length > 0)
        p_key, p_value = fresh.k + i_b.to(tl.int64) * fresh.K_TOKEN, fresh.v + i_b.to(tl.int64) * fresh.V_TOKEN
        store_new(p_key + i_kv * D, p_value + i_kv * D, p_here, plan.bad + i_b, D, BD)
    end(PDL)


@triton.jit(do_not_specialize=["PHASE"])
def keep_kernel(
    plan, held, window, summary, means, SINKS, EVERY, PHASE,
    BLOCK: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, W: tl.constexpr, PIECES: tl.constexpr, MEANED: tl.constexpr,
    SEARCH: tl.constexpr, STRIDE: tl.constexpr, SUMMARISE: tl.constexpr,
):  # fmt: skip
    """Program (token and KV head, piece): what `paged_step_kernel` keeps of a new token besides its place in the window, where
    `recent_kernel` has stored it. Reads nothing that belongs to the pass, so it may run when later layers have."""
    i_pair, i_piece = tl.program_id(0) // PIECES, tl.program_id(0) % PIECES
    i_b, i_kv = i_pair // held.HEADS, i_pair % held.HEADS
    p_own, length = plan.rows + i_b * STRIDE + SEARCH, tl.load(plan.rows + i_b * STRIDE + SEARCH)
    i_row = tl.load(p_own + 1).to(tl.int64)
    if length > 0:
        p_here = (
            window.rows + window_place(window, window.table + i_row * window.TABLE, length - 1, i_kv, length > 0) - i_kv * D
        )
        rows = head_rows(Fresh(p_here, p_here + D, 0, 0), window, held, 0, 0, length - 1, tl.load(p_own + 4), i_row, i_kv, D)
        keep_piece(rows, i_piece, length - 1, summary, means, SINKS, EVERY, PHASE, BLOCK, D, BD, W, PIECES, MEANED,
                   SUMMARISE)  # fmt: skip


@triton.jit(do_not_specialize=["PROGRAMS", "PHASE"])
def paged_step_kernel(
    p_queries, fresh, plan, p_ids, held, window, cache, parts, summary, means, scaling, softcap, Q_TOKEN, PROGRAMS, K, SINKS,
    EVERY, PHASE,
    BLOCK: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, G: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
    CHOSEN: tl.constexpr, PIECES: tl.constexpr, SINK_PARTS: tl.constexpr, MEANED: tl.constexpr, SEARCH: tl.constexpr,
    STRIDE: tl.constexpr, CAP: tl.constexpr, WAYS: tl.constexpr, SUMMARISE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (token and KV head, part), PROGRAMS of each pair: CHOSEN parts of R selected rows, PIECES that summarise and keep
    the new token, then SINK_PARTS and the window's parts of W rows each, unless `window_kernel` attends to it. Other launches
    fill the later ones of the parts of the merge.

    queries: token b begins at element b * Q_TOKEN. fresh, plan, ids `[·, K]`, the selections, and parts begin with this
    launch's first token; those of one sequence lie side by side. held, window and cache (`cached_rows`) are those of the layer.
    The first PIECES - MEANED - 1 pieces call SUMMARISE with `summary`, as `cache.paged_rows.summarise_nothing`. With MEANED, a
    piece computes the mean of a page that ends with the new token.

    The new token, and those of its sequence before it in the pass, are attended to where the model put them. It is stored in
    the window's pages, and with the last token of a run (`run_start`) the rows of the run go to their block: many small writes
    to the host are slow, because each of them needs a page's address. No token reads what another one of the pass stores: the
    window has all of them, and sinks and zone end before it.
    """
    HEADS = held.HEADS
    i_pair, i_p = readers_first(tl.program_id(0), tl.num_programs(0) // PROGRAMS, CHOSEN)
    i_b, i_kv = i_pair // HEADS, i_pair % HEADS
    p_own, length = plan.rows + i_b * STRIDE + SEARCH, tl.load(plan.rows + i_b * STRIDE + SEARCH)
    i_row = tl.load(p_own + 1).to(tl.int64)
    p_blocks, p_pages = held.table + i_row * held.TABLE, window.table + i_row * window.TABLE
    place, newest, ends = tl.load(p_own + 3), length - 1, tl.load(p_own + 4)
    o_part = i_pair.to(tl.int64) * G * parts.COUNT
    p_part, p_part_lse = parts.out + o_part * D, parts.lse + o_part
    p_query = p_queries + i_b.to(tl.int64) * Q_TOKEN + i_kv * G * D
    if i_p < CHOSEN:
        begin(PDL)  # only readers of selected rows depend on the search
    if MEANED:
        end(PDL)  # the launch of the later parts depends on the search, not on this one
    if i_p < CHOSEN:
        o_k = i_p * R + tl.arange(0, R)
        if tl.load(plan.fire + i_b) != 0:
            b_id = tl.load(p_ids + i_pair * K + o_k, mask=o_k < K, other=-1)
            b_k, b_v, read = cached_rows(held.pool, p_blocks, cache, place, b_id, i_kv, HEADS, BLOCK, D, BD, WAYS, held.NEAR,
                                        held.FAR, True)  # fmt: skip
            tl.atomic_add(plan.read + i_b, read.to(tl.int64), sem="relaxed")
            attend_block(p_query, p_part, p_part_lse, i_p, b_k, b_v, b_id >= 0, scaling, softcap, D, BD, G, parts.COUNT, CAP)
        else:
            empty_part(p_part_lse, i_p, G, parts.COUNT)
    elif i_p < CHOSEN + PIECES:
        if length > 0:
            rows = head_rows(fresh, window, held, i_b.to(tl.int64), tl.load(p_own + 2), newest, ends, i_row, i_kv, D)
            keep_piece(rows, i_p - CHOSEN, newest, summary, means, SINKS, EVERY, PHASE, BLOCK, D, BD, R, PIECES, MEANED,
                       SUMMARISE)  # fmt: skip
    elif i_p < CHOSEN + PIECES + SINK_PARTS:
        i_part = i_p - PIECES
        first, stop = (i_part - CHOSEN) * W, tl.minimum(SINKS, ends)
        if first < stop:
            o_r = first + tl.arange(0, W)
            b_sink = tl.where(o_r < stop, o_r, -1)
            b_k, b_v, _ = cached_rows(held.pool, p_blocks, cache, place, b_sink, i_kv, HEADS, BLOCK, D, BD, WAYS, held.NEAR,
                                     held.FAR, True)  # fmt: skip
            attend_block(p_query, p_part, p_part_lse, i_part, b_k, b_v, b_sink >= 0, scaling, softcap, D, BD, G, parts.COUNT,
                         CAP)  # fmt: skip
        else:
            empty_part(p_part_lse, i_part, G, parts.COUNT)
    else:
        i_share, shares = i_p - CHOSEN - PIECES - SINK_PARTS, PROGRAMS - CHOSEN - PIECES - SINK_PARTS
        first, stop = share_of(ends, length, i_share, shares, W)
        if first < stop:
            attend_recent(
                p_query, fresh, i_b, i_kv, window, p_pages, plan.bad + i_b, parts, o_part, i_p - PIECES, first, stop, length,
                tl.load(p_own + 2), scaling, softcap, D, BD, G, W, CAP, 1,
            )  # fmt: skip
        else:
            empty_part(p_part_lse, i_p - PIECES, G, parts.COUNT)
    end(PDL)


@triton.jit
def mean_place(means, p_blocks, first, i_kv, BLOCK: tl.constexpr, D: tl.constexpr):
    """Where the mean of the page that begins at position `first` lies, for one KV head of a sequence with these blocks."""
    block = tl.load(p_blocks + first // BLOCK).to(tl.int64)
    return means.rows + block * means.STRIDE + (i_kv * BLOCK + first % BLOCK) // means.TOKENS * (2 * D)


@triton.jit(do_not_specialize=["PHASE"])
def run_kernel(
    held, window, p_chunks, EVERY, PHASE, BLOCK: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, W: tl.constexpr
):  # fmt: skip
    """Program (KV head, chunk): copies the run that the earlier tokens of a sequence have begun from the window's pages to its
    block. chunks int32 `[n, 4]`: row of the batch, earlier tokens, first token in the pass, tokens; the rest as in
    `paged_step_kernel`."""
    p_own = p_chunks + tl.program_id(1) * 4
    past = tl.load(p_own + 1)
    if past > 0:
        none = Fresh(window.rows, window.rows, 0, 0)
        rows = head_rows(none, window, held, 0, 0, past, 0, tl.load(p_own).to(tl.int64), tl.program_id(0), D)
        store_run(rows, run_start(past, PHASE, EVERY, BLOCK), past, BLOCK, D, BD, W)


@triton.jit(do_not_specialize=["tokens"])
def eight_bit_kernel(
    fresh, p_keys, p_values, key_part, value_part, tokens, HEADS,
    D: tl.constexpr, BD: tl.constexpr, T: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (T tokens, KV head): keys and values uint8 `[tokens, HEADS, D]` of a pass in e4m3, times key_part and value_part.
    Numbers beyond its range become its largest; NaN and infinity become NaN. Bytes: 6 D per token in 16-bit types."""
    begin(PDL)
    o_t, i_h, o_d = tl.program_id(0) * T + tl.arange(0, T), tl.program_id(1), tl.arange(0, BD)
    m_row, o_long = (o_t < tokens)[:, None] & (o_d < D)[None, :], o_t.to(tl.int64)
    o_row = ((o_long * HEADS + i_h) * D)[:, None] + o_d[None, :]
    b_k = tl.load(fresh.k + (o_long * fresh.K_TOKEN + i_h * D)[:, None] + o_d[None, :], mask=m_row, other=0.0)
    b_v = tl.load(fresh.v + (o_long * fresh.V_TOKEN + i_h * D)[:, None] + o_d[None, :], mask=m_row, other=0.0)
    tl.store(p_keys + o_row, eight_bits(b_k, key_part), mask=m_row)
    tl.store(p_values + o_row, eight_bits(b_v, value_part), mask=m_row)
    end(PDL)


@triton.jit
def eight_bits(b_x, part):
    """Numbers times a part, in e4m3, as uint8."""
    b_own = b_x.to(tl.float32) * part
    b_code = tl.where(b_own * 0.0 == 0.0, tl.minimum(e4m3(tl.abs(b_own)), 126), 127)
    return (b_code | ((b_own.to(tl.int32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)


@triton.jit(do_not_specialize=["p_slots", "p_window_slots", "NEAR", "tokens"])
def store_kernel(
    fresh, p_slots, p_window_slots, p_staged, held, NEAR, window, p_bad, tokens,
    BLOCK: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Program (T tokens, KV head): stores tokens of prompts in their blocks if these are among the first NEAR ones, which are
    their own pages of the window. Others go to staged `[HEADS, tokens, 2, D]` and to the window's pages.

    slots, window_slots int64: block * tokens of a block + offset, < 0 for none, as in vLLM. bad[0] becomes 1 if a row is not
    finite; other arguments as in `paged_step_kernel`. Bytes: 4 D read, and 4 D written, 8 D for blocks on the host.
    """
    o_t, i_kv, o_d = tl.program_id(0) * T + tl.arange(0, T), tl.program_id(1), tl.arange(0, BD)
    m_t, m_d = o_t < tokens, (o_d < D)[None, :]
    b_slot = tl.load(p_slots + o_t, mask=m_t, other=-1)
    b_recent = tl.load(p_window_slots + o_t, mask=m_t, other=-1)
    m_row, o_long = (b_slot >= 0)[:, None] & m_d, o_t.to(tl.int64)
    b_k = tl.load(fresh.k + (o_long * fresh.K_TOKEN + i_kv * D)[:, None] + o_d[None, :], mask=m_row, other=0.0)
    b_v = tl.load(fresh.v + (o_long * fresh.V_TOKEN + i_kv * D)[:, None] + o_d[None, :], mask=m_row, other=0.0)
    flag_odd(p_bad, b_k, b_v)
    o_staged = (i_kv.to(tl.int64) * tokens + o_long) * (2 * D)
    m_near = b_slot // BLOCK < NEAR
    o_held = ((b_slot // BLOCK * held.HEADS + i_kv) * BLOCK + b_slot % BLOCK) * (2 * D)
    o_held += far_offset(b_slot // BLOCK, held.NEAR, held.FAR)
    p_row = tl.where(m_near[:, None], held.pool + o_held[:, None], p_staged + o_staged[:, None]) + o_d[None, :]
    tl.store(p_row, b_k, mask=m_row)
    tl.store(p_row + D, b_v, mask=m_row)
    m_recent = ((b_recent >= 0) & (b_slot // BLOCK >= NEAR))[:, None] & m_row
    o_recent = b_recent // window.PAGE * window.BLOCK + i_kv * window.HEAD + b_recent % window.PAGE * window.TOKEN
    p_here = window.rows + o_recent[:, None] + o_d[None, :]
    tl.store(p_here, b_k, mask=m_recent)
    tl.store(p_here + D, b_v, mask=m_recent)


@triton.jit(do_not_specialize=["p_slots", "NEAR", "tokens"])
def held_kernel(
    p_staged, p_slots, held, NEAR, tokens, TILES, BLOCK: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, T: tl.constexpr
):  # fmt: skip
    """Copies staged rows `[HEADS, tokens, 2, D]` to their blocks on the host: those from NEAR on; slots as in `store_kernel`.
    TILES of T tokens of a KV head; few programs share them, since a bus is full with few, and others run beside them. Bytes:
    4 D, over the bus."""
    o_d = tl.arange(0, 2 * BD)
    for i in range(tl.program_id(0), TILES, tl.num_programs(0)):
        i_kv, o_t = i % held.HEADS, i // held.HEADS * T + tl.arange(0, T)
        b_slot = tl.load(p_slots + o_t, mask=o_t < tokens, other=-1)
        b_block = b_slot // BLOCK
        m_row = ((b_slot >= 0) & (b_block >= NEAR))[:, None] & (o_d < 2 * D)[None, :]
        o_row = (i_kv * tokens + o_t).to(tl.int64) * (2 * D)
        o_held = ((b_block * held.HEADS + i_kv) * BLOCK + b_slot % BLOCK) * (2 * D) + far_offset(b_block, held.NEAR, held.FAR)
        b_row = tl.load(p_staged + o_row[:, None] + o_d[None, :], mask=m_row)
        tl.store(held.pool + o_held[:, None] + o_d[None, :], b_row, mask=m_row)


@triton.jit
def refill_kernel(p_rows, p_pool, NEAR, FAR, p_places, NUMBERS, N: tl.constexpr):
    """Program (piece of N numbers, place): copies the rows of a block, NUMBERS numbers, to a page of as many.

    pool with NEAR and FAR as in `core.structs.Pool`. places int32 `[n, 2]`: page, block.
    """
    p_own, o_n = p_places + tl.program_id(1) * 2, tl.program_id(0) * N + tl.arange(0, N)
    page, block, m_n = tl.load(p_own).to(tl.int64), tl.load(p_own + 1).to(tl.int64), o_n < NUMBERS
    b_row = tl.load(p_pool + block * NUMBERS + far_offset(block, NEAR, FAR) + o_n, mask=m_n)
    tl.store(p_rows + page * NUMBERS + o_n, b_row, mask=m_n)


@triton.jit
def mean_kernel(
    fresh, held, window, means, p_chunks, SINKS, BLOCK: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, T: tl.constexpr
):  # fmt: skip
    """Program (page, KV head, chunk): the mean of a page that a chunk of a prompt completes.

    fresh: tokens of the pass. Earlier ones of their sequences are in blocks. chunks as in `run_kernel`, others as in
    `paged_step_kernel`. Bytes: 4 D per token, read once.
    """
    i_kv, p_own = tl.program_id(1), p_chunks + tl.program_id(2) * 4
    past = tl.load(p_own + 1)
    first = (past // means.TOKENS + tl.program_id(0)) * means.TOKENS
    if first + means.TOKENS <= past + tl.load(p_own + 3):
        i_row, i_token = tl.load(p_own).to(tl.int64), tl.load(p_own + 2).to(tl.int64)
        rows = head_rows(fresh, window, held, i_token, 0, past, past, i_row, i_kv, D)
        take_mean(rows, mean_place(means, rows.blocks, first, i_kv, BLOCK, D), first, means.TOKENS, SINKS, BLOCK, D, BD, T)

"""From queries to look-up tables: rotation, then 256 entries per block of 8 coordinates, four query heads to a word.

Collisions score a key by one look-up per block. The four bytes of an int32 hold the entries of up to four query heads, so one
look-up and one addition serve them all. No byte overflows, because a key's entries add up to at most 6 S.
Centred keys also need the queries' products with their centres (`write_shifts`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvrecall.core.triton import begin, end


@triton.jit
def lane_query(p_group, lane, o_d, m_d, D: tl.constexpr, G: tl.constexpr, MEAN: tl.constexpr):
    """Query head `lane` of a group `[G, D]`, or (MEAN) their mean, fp32 `[BD]`."""
    if MEAN:
        b_q = tl.zeros([o_d.shape[0]], tl.float32)
        for g in tl.static_range(G):
            b_q += tl.load(p_group + g * D + o_d, mask=m_d, other=0.0).to(tl.float32)
        b_q = b_q / G
    else:
        b_q = tl.load(p_group + lane * D + o_d, mask=m_d, other=0.0).to(tl.float32)
    return b_q


@triton.jit
def query_part(p_query, o_k, m_k, m_n, D: tl.constexpr, G: tl.constexpr, MEAN: tl.constexpr):
    """Coordinates o_k of the queries at p_query `[1, BN]`, fp32 `[BK, BN]`; or (MEAN) the means of their groups."""
    m_q = m_k[:, None] & m_n[None, :]
    b_q = tl.load(p_query + o_k[:, None], mask=m_q, other=0.0).to(tl.float32)
    if MEAN:
        for g in tl.static_range(1, G):
            b_q += tl.load(p_query + g * D + o_k[:, None], mask=m_q, other=0.0).to(tl.float32)
        b_q = b_q / G
    return b_q


@triton.jit
def write_shifts(
    p_queries, p_means, MEANS, p_cos, p_sin, p_shifts, p_sums, i_first, i_block, spans, SPANS, MAPS,
    D: tl.constexpr, BD: tl.constexpr, BK: tl.constexpr, G: tl.constexpr, LANES: tl.constexpr, TOGETHER: tl.constexpr,
    BN: tl.constexpr, PAIRS: tl.constexpr, BR: tl.constexpr, STAGES: tl.constexpr, MEAN: tl.constexpr,
):  # fmt: skip
    """Products of queries with the centres of BR spans, and their sums, for TOGETHER heads of a sequence from `i_first` on.

    A centre is cos x mean + sin x partner, coordinate by coordinate. So the products of all heads are two matrix products with
    the turns, which are read once. PAIRS: coordinates that far from each other have the same cos and opposite sin, so one
    column of the turns serves both (`cos_sin.pair_stride`); 0 if they do not. BN: lanes of these heads, padded. STAGES: parts
    of the turns that are prefetched.
    """
    o_n, o_span = tl.arange(0, BN), i_block * BR + tl.arange(0, BR)
    m_n, m_span = o_n < TOGETHER * LANES, o_span < spans
    i_row = i_first + o_n // LANES
    o_lane = i_row.to(tl.int64) * LANES + o_n % LANES
    p_query = p_queries + (i_row.to(tl.int64) * G + o_n % LANES)[None, :] * D
    p_mean = p_means + ((i_row % MAPS) * D)[None, :]
    b_shift = tl.zeros([BR, BN], tl.float32)
    END: tl.constexpr = BD if PAIRS == 0 else triton.cdiv(D, 2 * PAIRS) * PAIRS
    for i_k in tl.range(0, END, BK, num_stages=STAGES):
        o_k = i_k + tl.arange(0, BK)
        if PAIRS > 0:
            o_k = o_k // PAIRS * (2 * PAIRS) + o_k % PAIRS
        m_k = o_k < D
        m_table, m_query = m_span[:, None] & m_k[None, :], m_k[:, None] & m_n[None, :]
        b_cos = tl.load(p_cos + o_span[:, None] * D + o_k[None, :], mask=m_table, other=0.0)
        b_sin = tl.load(p_sin + o_span[:, None] * D + o_k[None, :], mask=m_table, other=0.0)
        b_q = query_part(p_query, o_k, m_k, m_n, D, G, MEAN)
        b_mean = tl.load(p_mean + o_k[:, None], mask=m_query, other=0.0)
        if PAIRS > 0:
            o_p = o_k + PAIRS
            b_other = query_part(p_query, o_p, o_p < D, m_n, D, G, MEAN)
            b_partner = tl.load(p_mean + o_p[:, None], mask=(o_p < D)[:, None] & m_n[None, :], other=0.0)
            b_plain, b_turned = b_q * b_mean + b_other * b_partner, b_q * b_partner - b_other * b_mean
        else:
            b_partner = tl.load(p_mean + MEANS + o_k[:, None], mask=m_query, other=0.0)
            b_plain, b_turned = b_q * b_mean, b_q * b_partner
        b_shift = tl.dot(b_cos, b_plain, b_shift, input_precision="tf32x3")
        b_shift = tl.dot(b_sin, b_turned, b_shift, input_precision="tf32x3")
    tl.store(p_shifts + (o_lane * SPANS)[None, :] + o_span[:, None], b_shift, mask=m_span[:, None] & m_n[None, :])
    p_sum = p_sums + (o_lane * tl.cdiv(SPANS, BR) + i_block) * 2
    tl.store(p_sum, tl.sum(b_shift, 0), mask=m_n)
    tl.store(p_sum + 1, tl.sum(b_shift * b_shift, 0), mask=m_n)


@triton.jit(do_not_specialize=["START", "FIELDS"])
def rotate_kernel(p_queries, p_maps, p_means, p_cos, p_sin, p_plan, p_fire, p_rotated, p_shifts, p_sums, p_total,
                  p_zero_norms, p_zeros, MAP, MEANS, HEADS, START, SPANS, MAPS, OWN_HEADS, ZEROS,
                  FIELDS, D: tl.constexpr, BD: tl.constexpr, BK: tl.constexpr, G: tl.constexpr, LANES: tl.constexpr,
                  ROWS: tl.constexpr, PIECES: tl.constexpr, TOGETHER: tl.constexpr, BN: tl.constexpr, PAIRS: tl.constexpr,
                  BR: tl.constexpr, STAGES: tl.constexpr, SPAN: tl.constexpr, MEAN: tl.constexpr, BINS: tl.constexpr,
                  PDL: tl.constexpr):  # fmt: skip
    """Program (sequence and KV head, piece): ROWS coordinates of the rotated queries, fp32 `[BH, LANES, D]`.

    A lane is a query head of the group, or (MEAN) their mean. MAP: stride of the maps of heads, 0 for one shared
    rotation. MAPS: heads with maps; HEADS is smaller if each is searched as a sequence of its own. One program per head clears
    the histogram of the scores. It also copies zero_norms int32 `[b, OWN_HEADS]`, of stride ZEROS between sequences, to zeros
    `[bh]`: a step beside this search may set the former while a scan runs, whose threads must all see the same. Programs after
    the first PIECES are for centred keys: they write the products of the queries with BR centres at a time, shifts
    `[BH, LANES, SPANS]`, and the sums of these and of their squares, `[BH, LANES, ceil(SPANS / BR), 2]`, for TOGETHER heads of
    a sequence.
    """
    i_bh, i_p = START + tl.program_id(0), tl.program_id(1)
    if i_p < PIECES:
        i_h = (i_bh % MAPS).to(tl.int64)
        o_d, o_r = tl.arange(0, BD), i_p * ROWS + tl.arange(0, ROWS)
        m_d = o_d < D
        m_r = (o_r < D)[:, None] & m_d[None, :]
        b_r = tl.load(p_maps + i_h * MAP + o_r[:, None] * D + o_d[None, :], mask=m_r, other=0.0)
        begin(PDL)
        if tl.load(p_fire + i_bh // HEADS) != 0:
            if i_p == 0:
                tl.store(p_total + i_bh * BINS + tl.arange(0, BINS), tl.zeros([BINS], tl.int32))
                tl.store(p_zeros + i_bh, tl.load(p_zero_norms + i_bh // OWN_HEADS * ZEROS + i_bh % OWN_HEADS))
            p_group = p_queries + i_bh.to(tl.int64) * G * D
            for lane in tl.static_range(LANES):
                b_q = lane_query(p_group, lane, o_d, m_d, D, G, MEAN)
                tl.store(p_rotated + (i_bh * LANES + lane) * D + o_r, tl.sum(b_r * b_q[None, :], 1), mask=o_r < D)
    else:
        begin(PDL)
        i_turn = tl.program_id(0) % TOGETHER
        spans = tl.cdiv(tl.load(p_plan + i_bh // HEADS * FIELDS), SPAN)
        if tl.load(p_fire + i_bh // HEADS) != 0:
            for i_block in range((i_p - PIECES) * TOGETHER + i_turn, tl.cdiv(spans, BR),
                                 (tl.num_programs(1) - PIECES) * TOGETHER):  # fmt: skip
                write_shifts(
                    p_queries, p_means, MEANS, p_cos, p_sin, p_shifts, p_sums, i_bh - i_turn, i_block, spans, SPANS, MAPS, D,
                    BD, BK, G, LANES, TOGETHER, BN, PAIRS, BR, STAGES, MEAN,
                )  # fmt: skip
    end(PDL)


@triton.jit
def coordinate(b_own, j: tl.constexpr):
    """Coordinate j `[L]` of blocks `[8, L]`."""
    return tl.sum(tl.where((tl.arange(0, 8) == j)[:, None], b_own, 0.0), 0)


@triton.jit
def proxies(b_own, o_p):
    """Products of blocks `[8, L]` with sign patterns `o_p`: fp32 `[patterns, L]`; summed in the reference's order."""
    q_0 = coordinate(b_own, 0)
    b_sum = tl.where((o_p[:, None] & 1) == 1, q_0[None, :], -q_0[None, :])
    for j in tl.static_range(1, 8):
        q_j = coordinate(b_own, j)
        b_sum += tl.where(((o_p >> j) & 1)[:, None] == 1, q_j[None, :], -q_j[None, :])
    return b_sum


@triton.jit
def collision_entries(b_own, p_counts, p_targets, C: tl.constexpr, TIERS: tl.constexpr):
    """Tiers of the 256 sign patterns for blocks `[8, L]`, int32 `[256, L]` of 0..6 (Eq. 15); equal products rank by pattern."""
    o_p, o_l = tl.arange(0, 256), tl.arange(0, b_own.shape[1])
    b_proxy = proxies(b_own, o_p)
    b_tiers = tl.zeros_like(b_proxy).to(tl.int32)
    for lane in tl.static_range(b_own.shape[1]):
        b_mine = tl.sum(tl.where(o_l[None, :] == lane, b_proxy, 0.0), 1)
        b_better = tl.zeros([256], tl.int32)
        for i_c in range(0, 256, C):
            o_c = i_c + tl.arange(0, C)
            b_other = tl.sum(tl.where(o_l[None, :] == lane, proxies(b_own, o_c), 0.0), 1)
            m_ahead = (b_other[None, :] == b_mine[:, None]) & (o_c[None, :] < o_p[:, None])
            m_ahead = m_ahead | (b_other[None, :] > b_mine[:, None])
            b_better += tl.sum(tl.where(m_ahead, tl.load(p_counts + o_c)[None, :], 0), 1)
        for t in tl.static_range(TIERS):
            b_tiers += ((b_better < tl.load(p_targets + t))[:, None] & (o_l == lane)[None, :]).to(tl.int32)
    return b_tiers


@triton.jit(do_not_specialize=["START", "FIELDS"])
def tables_kernel(
    p_rotated, p_counts, p_plan, p_fire, p_tables, HEADS, START,
    FIELDS, D: tl.constexpr, S: tl.constexpr, LANES: tl.constexpr, WORDS: tl.constexpr, L: tl.constexpr, C: tl.constexpr,
    TARGETS: tl.constexpr, TIERS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (sequence and KV head, block): the tables of one block.

    L: lanes per word, 1 or 4. C: patterns that are compared at a time.
    """
    begin(PDL)
    i_bh, i_s = START + tl.program_id(0), tl.program_id(1)
    i_b = i_bh // HEADS
    if tl.load(p_fire + i_b) != 0:
        o_8, o_l, o_p = tl.arange(0, 8), tl.arange(0, L), tl.arange(0, 256)
        for w in tl.static_range(WORDS):
            m_l = w * 4 + o_l < LANES
            p_lane = p_rotated + (i_bh * LANES + w * 4 + o_l) * D
            b_own = tl.load(p_lane[None, :] + i_s * 8 + o_8[:, None], mask=(o_8 >= 0)[:, None] & m_l[None, :], other=0.0)
            p_own = p_counts + (i_bh * S + i_s).to(tl.int64) * 256
            b_entries = collision_entries(b_own, p_own, p_plan + i_b * FIELDS + TARGETS, C, TIERS)
            b_word = tl.sum(tl.where(m_l[None, :], b_entries, 0) << (8 * o_l)[None, :], 1)
            tl.store(p_tables + ((i_bh * WORDS + w) * S + i_s) * 256 + o_p, b_word)
    end(PDL)

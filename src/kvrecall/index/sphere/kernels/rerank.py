"""Stage II: estimated products of the candidates with the queries. Bytes: 6 S per candidate."""

from __future__ import annotations

import triton
import triton.language as tl

from kvrecall.core.triton import begin, end
from kvrecall.index.sphere.kernels.blocks import numbers_of
from kvrecall.index.sphere.kernels.encode import weight_values
from kvrecall.index.sphere.kernels.work import first_part, part, parts, step, stop


@triton.jit
def block_level(b_low, b_mid, b_top, u, U: tl.constexpr):
    """The 24 bits of levels of block u, from bit 0 on. Three words hold four blocks, or three bytes one block."""
    if U == 1:
        b_level = b_low | (b_mid << 8) | (b_top << 16)
    else:  # from one word or two; the first and the last block lie in one
        b_first = tl.where(u < 2, b_low, tl.where(u == 2, b_mid, b_top)).to(tl.uint32, bitcast=True)
        b_rest = tl.where(u == 1, b_mid, b_top) << (8 * u)
        b_level = (b_first >> (24 * u) % 32).to(tl.int32, bitcast=True) | tl.where((u == 1) | (u == 2), b_rest, 0)
    return b_level


@triton.jit
def in_rows(p_x, o_x):
    """p_x + o_x `[R, BU]`, with a hint that neighbouring threads read neighbouring columns.

    Without the hint the compiler chooses another order for loads that are not contiguous, and shuffles codes between orders.
    """
    return tl.multiple_of(tl.max_contiguous(p_x + o_x, (1, o_x.shape[1])), (1, 1))


@triton.jit(do_not_specialize=["START", "PAIRS", "TABLE", "ROOM", "PARTS", "SPANS", "FIELDS"])
def rerank_kernel(
    p_signs, p_magnitudes, p_weights, p_table, p_levels, p_rotated, p_plan, p_fire, p_ids, p_estimates, p_peak, p_mass,
    p_shifts, scaling, HEADS, START, PAIRS, ROOM, PARTS, UNITS, SPANS, OWN_HEADS, TABLE, BYTES, FIELDS, BLOCK: tl.constexpr,
    D: tl.constexpr, S: tl.constexpr, U: tl.constexpr, BU: tl.constexpr, LANES: tl.constexpr, BL: tl.constexpr, R: tl.constexpr,
    LARGEST: tl.constexpr, SOFTMAX: tl.constexpr, CENTRED: tl.constexpr, SPAN: tl.constexpr,
    SEQUENCES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Part (R candidates, sequence and KV head): writes their estimates[bh, lane, ·] (Eq. 24).

    The id of a key of zero norm becomes -1 - id, which ranks after all others. LARGEST: stores only the group's largest
    estimate, in lane 0. CENTRED: adds the shift of each span of SPAN tokens, fp32 `[bh, lane, SPANS]`. SOFTMAX: also writes
    peak and mass `[bh, lane, part]` of a softmax over the candidates. A key has UNITS units of U blocks; one thread reads one
    unit: 4 blocks as one word of signs, three of levels and, with 8-bit weights, one of weights; or 1 block as bytes. levels:
    fp32 `[16]`, negative magnitudes, then positive ones. BLOCK, BYTES, OWN_HEADS, table: as in `collision_kernel`.
    """
    b_parts, b_until = parts(p_plan + 1, START, PAIRS, HEADS, FIELDS, R, SEQUENCES)
    for number in range(first_part(SEQUENCES), stop(b_until, SEQUENCES), step(SEQUENCES)):
        i_part, i_bh = part(number, b_parts, b_until, START, HEADS, SEQUENCES)
        i_b = i_bh // HEADS
        wanted = tl.load(p_plan + i_b * FIELDS + 1)
        begin(PDL)
        if (tl.load(p_fire + i_b) != 0) & (i_part * R < wanted):
            o_u, o_c = tl.arange(0, BU), i_part * R + tl.arange(0, R)
            m_c, m_q = o_c < wanted, o_u < S // U
            p_id = p_ids + i_bh.to(tl.int64) * ROOM + o_c
            b_id = tl.load(p_id, mask=m_c, other=0)
            m_u = m_c[:, None] & m_q[None, :]
            o_l = tl.arange(0, BL)
            b_shift = tl.zeros([R, BL], tl.float32)
            if CENTRED:  # loaded early because it takes long
                p_shift = p_shifts + (i_bh.to(tl.int64) * LANES + o_l)[None, :] * SPANS + (b_id // SPAN)[:, None]
                b_shift = tl.load(p_shift, mask=m_c[:, None] & (o_l < LANES)[None, :], other=0.0)
            i_h, p_own = i_bh % OWN_HEADS, p_table + i_bh // OWN_HEADS * TABLE
            b_block = tl.load(p_own + b_id // BLOCK, mask=m_c, other=0).to(tl.int64)[:, None]
            o_unit = (i_h * BLOCK + b_id % BLOCK)[:, None] * UNITS + o_u[None, :]
            o_sign = b_block * numbers_of(p_signs, BYTES) + o_unit
            o_level = b_block * numbers_of(p_magnitudes, BYTES) + o_unit * 3
            b_sign = tl.load(in_rows(p_signs, o_sign), mask=m_u, other=0).to(tl.int32)
            b_low = tl.load(in_rows(p_magnitudes, o_level), mask=m_u, other=0).to(tl.int32)
            b_mid = tl.load(in_rows(p_magnitudes, o_level + 1), mask=m_u, other=0).to(tl.int32)
            b_top = tl.load(in_rows(p_magnitudes, o_level + 2), mask=m_u, other=0).to(tl.int32)
            o_block = b_block * numbers_of(p_weights, BYTES)
            WORDS: tl.constexpr = p_weights.dtype.element_ty == tl.int32
            b_norm = tl.zeros([R, BU], tl.float32)
            if WORDS:
                b_words = tl.load(in_rows(p_weights, o_block + o_unit), mask=m_u, other=0)
            b_dots = ()
            for _ in tl.static_range(LANES):
                b_dots = b_dots + (b_norm,)
            for u in range(U):  # not unrolled: the compiler's passes over loads take time with their square
                if WORDS:
                    b_weight = weight_values(((b_words >> (8 * u)) & 255).to(tl.uint8))
                else:
                    b_weight = weight_values(tl.load(in_rows(p_weights, o_block + o_unit * U + u), mask=m_u, other=0))
                b_norm += b_weight
                b_level = block_level(b_low, b_mid, b_top, u, U)
                b_xs = ()
                for j in tl.static_range(8):
                    b_index = ((b_level >> (3 * j)) & 7) | (((b_sign >> (8 * u + j)) & 1) << 3)
                    b_xs = b_xs + (tl.load(in_rows(p_levels, b_index)),)
                b_sums = ()
                for lane in tl.static_range(LANES):
                    p_query = p_rotated + (i_bh * LANES + lane) * D + (o_u * U + u) * 8
                    b_dot = b_xs[0] * tl.load(p_query, mask=m_q, other=0.0)[None, :]
                    for j in tl.static_range(1, 8):
                        b_dot += b_xs[j] * tl.load(p_query + j, mask=m_q, other=0.0)[None, :]
                    b_sums = b_sums + (b_dots[lane] + b_weight * b_dot,)
                b_dots = b_sums
            tl.store(p_id, -1 - b_id, mask=m_c & (tl.sum(b_norm, 1) == 0.0))
            # All lanes in one reduction.
            b_all = tl.full([R, BL], float("-inf"), tl.float32)
            for lane in tl.static_range(LANES):
                b_all = tl.where((o_l == lane)[None, :], tl.sum(b_dots[lane], 1)[:, None], b_all)
            b_all += b_shift
            p_estimate = p_estimates + i_bh.to(tl.int64) * (ROOM if LARGEST else LANES * ROOM)
            m_l = o_l < LANES
            if LARGEST:
                tl.store(p_estimate + o_c, tl.max(b_all, 1), mask=m_c)
            else:
                tl.store(p_estimate + (o_l * ROOM)[None, :] + o_c[:, None], b_all, mask=m_c[:, None] & m_l[None, :])
            if SOFTMAX:
                b_x = tl.where(m_c[:, None] & m_l[None, :], b_all * scaling, float("-inf"))
                b_peak = tl.max(b_x, 0)
                b_mass = tl.sum(tl.exp(b_x - tl.where(m_l, b_peak, 0.0)[None, :]), 0)
                o_part = (i_bh * LANES + o_l) * PARTS + i_part
                tl.store(p_peak + o_part, b_peak, mask=m_l)
                tl.store(p_mass + o_part, b_mass, mask=m_l)
    begin(PDL)  # programs without a part, too: this launch must end after the one before it
    end(PDL)

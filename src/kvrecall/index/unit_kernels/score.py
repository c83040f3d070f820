"""Scores of units for all query heads of a group, each representation read once: bounding volumes or means of keys.

Bytes per unit: its representation, 2 D numbers for a volume and D for a mean, and its 4-byte offset; written are 4 bytes per
query head. Tensor cores multiply 16-bit queries and representations of one dtype: products are exact, sums are fp32. Others are
multiplied in fp32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvrecall.core.triton import begin, end
from kvrecall.index.unit_kernels import SCORE_STEP

_STEP = tl.constexpr(SCORE_STEP)


@triton.jit
def unit_sizes(p_row, i_kv, o_u, m_u):
    """First member and size, int32, of units o_u of one KV head; both 0 if m_u is false. p_row: the plan's row."""
    p_offsets = tl.load(p_row + 6).to(tl.pointer_type(tl.int32)) + i_kv * tl.load(p_row + 7)
    b_first = tl.load(p_offsets + o_u, mask=m_u, other=0)
    return b_first, tl.load(p_offsets + o_u + 1, mask=m_u, other=0) - b_first


@triton.jit
def scores_of(p_row, i_kv, units, LANES: tl.constexpr):
    """Scores fp32 `[LANES, width]` of one KV head, and their width. p_row: the plan's row."""
    width = tl.multiple_of(tl.cdiv(units, _STEP) * _STEP, _STEP)
    p_scores = tl.multiple_of(tl.load(p_row + 9).to(tl.pointer_type(tl.float32)), 16)
    return p_scores + i_kv.to(tl.int64) * LANES * width, width


@triton.jit
def dot_scores(p_queries, p_reps, m_u, D: tl.constexpr, BD: tl.constexpr, LANES: tl.constexpr, BL: tl.constexpr,
               WIDTH: tl.constexpr):  # fmt: skip
    """Scores `[R, BL]` by tensor cores: representations at p_reps `[R, 1]` of WIDTH = D or 2 D numbers, queries
    `[LANES, D]`."""
    o_d, o_l = tl.arange(0, BD), tl.arange(0, BL)
    m_d = o_d < D
    b_q = tl.load(p_queries + o_l[None, :] * D + o_d[:, None], mask=m_d[:, None] & (o_l < LANES)[None, :], other=0.0)
    m_rep = m_u[:, None] & m_d[None, :]
    b_rep = tl.load(p_reps + o_d[None, :], mask=m_rep, other=0.0)  # [R, BD]
    if WIDTH == D:
        return tl.dot(b_rep, b_q)
    b_zero = tl.zeros_like(b_q)
    b_low = tl.load(p_reps + D + o_d[None, :], mask=m_rep, other=0.0)
    return tl.dot(b_low, tl.where(b_q < 0, b_q, b_zero), tl.dot(b_rep, tl.where(b_q > 0, b_q, b_zero)))


@triton.jit
def sum_scores(p_queries, p_reps, m_u, R: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, G: tl.constexpr,
               LANES: tl.constexpr, BL: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """As `dot_scores`, in fp32 for any dtypes. A single lane for several queries takes their mean."""
    o_d, o_l = tl.arange(0, BD), tl.arange(0, BL)
    m_d = o_d < D
    m_rep = m_u[:, None] & m_d[None, :]
    b_rep = tl.load(p_reps + o_d[None, :], mask=m_rep, other=0.0).to(tl.float32)
    if WIDTH != D:
        b_low = tl.load(p_reps + D + o_d[None, :], mask=m_rep, other=0.0).to(tl.float32)
    b_s = tl.zeros([R, BL], tl.float32)
    for lane in tl.static_range(LANES):
        b_q = tl.load(p_queries + lane * D + o_d, mask=m_d, other=0.0).to(tl.float32)
        if LANES < G:
            for g in tl.static_range(1, G):
                b_q += tl.load(p_queries + g * D + o_d, mask=m_d, other=0.0).to(tl.float32)
            b_q = b_q / G
        if WIDTH == D:
            b_one = tl.sum(b_rep * b_q[None, :], 1)
        else:
            b_one = tl.sum(b_rep * tl.maximum(b_q, 0.0)[None, :] + b_low * tl.minimum(b_q, 0.0)[None, :], 1)
        b_s = tl.where((o_l == lane)[None, :], b_one[:, None], b_s)
    return b_s


@triton.jit
def score_kernel(
    p_queries, p_like, p_plan, p_fire, p_peak, p_mass, scaling, HEADS, PARTS,
    D: tl.constexpr, BD: tl.constexpr, G: tl.constexpr, LANES: tl.constexpr, BL: tl.constexpr, R: tl.constexpr,
    WIDTH: tl.constexpr, DOT: tl.constexpr, LARGEST: tl.constexpr, SOFTMAX: tl.constexpr, SIZED: tl.constexpr,
    FIELDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (R units, sequence and KV head): scores fp32 of queries `[bh, G, D]`, see `scores_of`; empty units -inf.

    p_like: any pointer of the representations' dtype. LARGEST: stores only the group's largest score, in lane 0. SOFTMAX:
    also stores peak and mass `[bh, lane, PARTS]` of each lane's softmax over these units. SIZED: adds log(tokens) to logits.
    """
    i_part, i_bh = tl.program_id(0), tl.program_id(1)
    i_b, i_kv = i_bh // HEADS, i_bh % HEADS
    p_row = p_plan + i_b * FIELDS
    begin(PDL)
    # The row is read at once, and representations of empty units too, so that fewer reads wait for others.
    units, fire = tl.load(p_row), tl.load(p_fire + i_b)
    p_reps = tl.load(p_row + 2).to(tl.pointer_type(p_like.dtype.element_ty)) + i_kv * tl.load(p_row + 3)
    p_scores, width = scores_of(p_row, i_kv, units, 1 if LARGEST else LANES)
    o_u, o_l = i_part * R + tl.arange(0, R), tl.arange(0, BL)
    m_real = (o_u < units) & (fire != 0)
    _, b_size = unit_sizes(p_row, i_kv, o_u, m_real)
    if (fire != 0) & (i_part * R < units):
        m_u = b_size > 0
        p_rows = tl.multiple_of(p_reps, 16)  # lets the compiler read 16 bytes at a time
        p_rows += o_u.to(tl.int64)[:, None] * WIDTH
        p_own = p_queries + i_bh.to(tl.int64) * (G * D)
        if DOT:
            b_s = dot_scores(p_own, p_rows, m_real, D, BD, LANES, BL, WIDTH)
        else:
            b_s = sum_scores(p_own, p_rows, m_real, R, D, BD, G, LANES, BL, WIDTH)
        if SIZED:
            b_s += (tl.log(tl.maximum(b_size, 1).to(tl.float32)) / scaling)[:, None]
        m_l = o_l < LANES
        b_s = tl.where(m_u[:, None] & m_l[None, :], b_s, float("-inf"))
        if LARGEST:
            tl.store(p_scores + o_u, tl.max(b_s, 1), mask=m_real)
        else:
            p_lanes = p_scores + o_l[None, :] * width
            tl.store(p_lanes + o_u[:, None], b_s, mask=m_real[:, None] & m_l[None, :])
        if SOFTMAX:
            b_x = b_s * scaling
            b_peak = tl.max(b_x, 0)
            b_base = tl.where(b_peak == float("-inf"), 0.0, b_peak)
            o_part = (i_bh * LANES + o_l) * PARTS + i_part
            tl.store(p_peak + o_part, b_peak, mask=m_l)
            tl.store(p_mass + o_part, tl.sum(tl.exp(b_x - b_base[None, :]), 0), mask=m_l)
    end(PDL)

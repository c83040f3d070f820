"""The log-sum-exp merge of the parts of a split attention, on a GPU: one program per sequence and query head."""

from __future__ import annotations

import triton
import triton.language as tl

from kvrecall.core.triton import begin, end


@triton.jit
def merge_head(i_bh, p_parts, p_lse, p_sinks, p_out, HEADS, D: tl.constexpr, BD: tl.constexpr, PARTS: tl.constexpr,
               BP: tl.constexpr, SINKS: tl.constexpr):  # fmt: skip
    """out[bh] = attention over the union of parts `[BH_q, PARTS, D]` with lse `[BH_q, PARTS]`. An empty part has lse -inf; its
    numbers are not read.

    SINKS: one learned logit per query head takes mass and gives no value. Returns the natural log-sum-exp over all of it.
    """
    o_p, o_d = tl.arange(0, BP), tl.arange(0, BD)
    b_lse = tl.load(p_lse + i_bh * PARTS + o_p, mask=o_p < PARTS, other=float("-inf"))
    peak = tl.max(b_lse, 0)
    if SINKS:
        sink = tl.load(p_sinks + i_bh % HEADS).to(tl.float32)
        peak = tl.maximum(peak, sink)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    b_w = tl.exp(b_lse - base)
    mass = tl.sum(b_w, 0)
    if SINKS:
        mass += tl.exp(sink - base)
    m_part = (b_lse > float("-inf"))[:, None] & (o_d < D)[None, :]
    b_part = tl.load(p_parts + (i_bh * PARTS + o_p)[:, None] * D + o_d[None, :], mask=m_part, other=0.0)
    b_out = tl.sum(b_part * b_w[:, None], 0) / tl.where(mass > 0, mass, 1.0)
    tl.store(p_out + i_bh * D + o_d, b_out.to(p_out.dtype.element_ty), mask=o_d < D)
    return base + tl.log(mass)


@triton.jit
def merge_kernel(p_parts, p_lse, p_sinks, p_out, HEADS, D: tl.constexpr, BD: tl.constexpr, PARTS: tl.constexpr,
                 BP: tl.constexpr, SINKS: tl.constexpr, PDL: tl.constexpr = False):  # fmt: skip
    """`merge_head` for every sequence and query head."""
    begin(PDL)
    merge_head(tl.program_id(0).to(tl.int64), p_parts, p_lse, p_sinks, p_out, HEADS, D, BD, PARTS, BP, SINKS)
    end(PDL)


@triton.jit
def merge_lse_kernel(p_parts, p_lse, p_sinks, p_out, p_total, HEADS, D: tl.constexpr, BD: tl.constexpr, PARTS: tl.constexpr,
                     BP: tl.constexpr, SINKS: tl.constexpr, PDL: tl.constexpr = False):  # fmt: skip
    """As `merge_kernel`; total fp32 `[BH_q]` becomes the log-sum-exp."""
    begin(PDL)
    i_bh = tl.program_id(0).to(tl.int64)
    total = merge_head(i_bh, p_parts, p_lse, p_sinks, p_out, HEADS, D, BD, PARTS, BP, SINKS)
    tl.store(p_total + i_bh, total)
    end(PDL)


@triton.jit(do_not_specialize=["tokens"])
def take_in_kernel(p_out, p_lse, p_part, p_part_lse, tokens, OUT_H, OUT_T, PART_H, PART_T, D: tl.constexpr, BD: tl.constexpr,
                   R: tl.constexpr):  # fmt: skip
    """Program (R tokens, query head): out fp32 and lse become those of their union with a part, both `[H_q, tokens, D]` by
    their strides, lse `[H_q, tokens]` side by side. Bytes: 8 D to read and 4 D to write per head and token."""
    i_h, first = tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64) * R
    o_t, o_d = first + tl.arange(0, R), tl.arange(0, BD)
    m_t = o_t < tokens
    m_row = m_t[:, None] & (o_d < D)[None, :]
    b_lse = tl.load(p_lse + i_h * tokens + o_t, mask=m_t, other=float("-inf"))
    b_part_lse = tl.load(p_part_lse + i_h * tokens + o_t, mask=m_t, other=float("-inf"))
    b_peak = tl.maximum(b_lse, b_part_lse)
    b_base = tl.where(b_peak == float("-inf"), 0.0, b_peak)
    b_w, b_part_w = tl.exp(b_lse - b_base), tl.exp(b_part_lse - b_base)
    b_mass = b_w + b_part_w
    b_by = tl.where(b_mass > 0, 1 / b_mass, 0.0)
    p_row = p_out + i_h * OUT_H + o_t[:, None] * OUT_T + o_d[None, :]
    b_part = tl.load(p_part + i_h * PART_H + o_t[:, None] * PART_T + o_d[None, :], mask=m_row, other=0.0)
    b_out = tl.load(p_row, mask=m_row, other=0.0) * (b_w * b_by)[:, None] + b_part.to(tl.float32) * (b_part_w * b_by)[:, None]
    tl.store(p_row, b_out, mask=m_row)
    tl.store(p_lse + i_h * tokens + o_t, b_base + tl.log(b_mass), mask=m_t)

"""The log-sum-exp merge on a GPU: the parts of one step, or parts that are merged again, so that their sum is needed too. One
program per sequence and query head."""

# A launch takes what only Triton knows.
# pyright: reportCallIssue=false, reportIndexIssue=false, reportArgumentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvrecall.core.launch import cdiv, launch, next_power_of_2, overlapping
from kvrecall.core.structs import Partial
from kvrecall.core.triton import begin, end

_MOST = 64
"""Parts that one program merges: with D = 256 they fill its registers."""
_TOKENS = 16
"""Tokens per program of `take_in`."""


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


def merge_splits(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the union of parts: out fp32 `[N, P, D]`, lse `[N, P]` -> `[N, D]`, `[N]`; launches on the current device.

    P: at most 64, or 64 times a power of two, in which case groups are merged first.
    """
    while True:
        (count, parts, dim), group = out.shape, min(out.shape[1], _MOST)
        programs = count * parts // group
        merged, total = out.new_empty(programs, dim), out.new_empty(programs)
        launch(merge_lse_kernel, (programs,))(
            out.contiguous(), lse.contiguous(), lse, merged, total, 1, D=dim, BD=next_power_of_2(dim), PARTS=group,
            BP=next_power_of_2(group), SINKS=False, PDL=False, num_warps=4,
        )  # fmt: skip
        if group == parts:
            return merged, total
        out, lse = merged.view(count, -1, dim), total.view(count, -1)


def take_in(so_far: Partial, part: Partial) -> None:
    """so_far, of one sequence `[1, H_q, T, D]`, becomes attention over the union with a part of the same queries, in place."""
    (_, heads, tokens, dim), out, new = so_far.out.shape, so_far.out[0], part.out[0]
    assert out.stride(2) == new.stride(2) == 1 and so_far.lse.is_contiguous()
    with torch.cuda.device_of(out):
        launch(take_in_kernel, (cdiv(tokens, _TOKENS), heads))(
            out, so_far.lse, new, part.lse.contiguous(), tokens, *out.stride()[:2], *new.stride()[:2], D=dim,
            BD=next_power_of_2(dim), R=_TOKENS, num_warps=4,
        )  # fmt: skip


def merge_parts(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Parts fp32 `[B, H_q, 1, D]` with lse `[B, H_q, 1]`, at most 64 of them -> the same of their union."""
    with torch.cuda.device_of(outs[0]):
        out, lse = merge_splits(torch.stack(outs, 3).flatten(0, 2), torch.stack(lses, 3).flatten(0, 2))
    return out.view_as(outs[0]), lse.view_as(lses[0])


def merge_step(
    queries: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None, total: Tensor | None = None, into: Tensor | None = None
) -> Tensor:
    """Attention of queries `[B, H_q, 1, D]` over the union of parts: out fp32 `[B, H_q, P, D]`, lse `[B, H_q, P]`, at fixed
    addresses -> as queries. sinks: learned logits `[H_q]`. total: fp32 `[B, H_q]`, filled with the log-sum-exp of all. into:
    contiguous, of as many numbers as queries, becomes the result."""
    (b, heads, parts, dim), made = out.shape, torch.empty_like(queries) if into is None else into
    sizes = {
        "D": dim, "BD": next_power_of_2(dim), "PARTS": parts, "BP": next_power_of_2(parts), "SINKS": sinks is not None,
        "num_warps": 4, **overlapping(queries.device),
    }  # fmt: skip
    learned = lse if sinks is None else sinks
    if total is None:
        launch(merge_kernel, (b * heads,))(out, lse, learned, made, heads, **sizes)
    else:
        launch(merge_lse_kernel, (b * heads,))(out, lse, learned, made, total, heads, **sizes)
    return made

"""The log-sum-exp merge on a GPU where what is merged is merged again, so that its log-sum-exp is needed too."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvrecall.launch import next_power_of_2
from kvrecall.merge.kernels import merge_kernel

_MOST = 64
"""Parts that one program merges: with D = 256 they fill its registers."""


@triton.jit
def merge_lse_kernel(p_parts, p_lse, p_out, p_total, D: tl.constexpr, BD: tl.constexpr, PARTS: tl.constexpr,
                     BP: tl.constexpr):  # fmt: skip
    """As `merge_kernel` without sinks; total fp32 `[BH_q]` becomes the natural log-sum-exp over the parts."""
    merge_kernel(p_parts, p_lse, p_lse, p_out, 1, D, BD, PARTS, BP, False)
    i_bh = tl.program_id(0).to(tl.int64)
    o_p = tl.arange(0, BP)
    b_lse = tl.load(p_lse + i_bh * PARTS + o_p, mask=o_p < PARTS, other=float("-inf"))
    peak = tl.max(b_lse, 0)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    tl.store(p_total + i_bh, base + tl.log(tl.sum(tl.exp(b_lse - base), 0)))


def merge_splits(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the union of parts: out fp32 `[N, P, D]`, lse `[N, P]` -> `[N, D]`, `[N]`; launches on the current device.

    P: at most 64, or 64 times a power of two, in which case groups are merged first.
    """
    while True:
        (count, parts, dim), group = out.shape, min(out.shape[1], _MOST)
        programs = count * parts // group
        merged, total = out.new_empty(programs, dim), out.new_empty(programs)
        merge_lse_kernel[(programs,)](
            out.contiguous(), lse.contiguous(), merged, total, D=dim, BD=next_power_of_2(dim), PARTS=group,
            BP=next_power_of_2(group), num_warps=4,
        )  # fmt: skip
        if group == parts:
            return merged, total
        out, lse = merged.view(count, -1, dim), total.view(count, -1)


def merge_parts(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Parts fp32 `[B, H_q, 1, D]` with lse `[B, H_q, 1]`, at most 64 of them -> the same of their union."""
    with torch.cuda.device_of(outs[0]):
        out, lse = merge_splits(torch.stack(outs, 3).flatten(0, 2), torch.stack(lses, 3).flatten(0, 2))
    return out.view_as(outs[0]), lse.view_as(lses[0])

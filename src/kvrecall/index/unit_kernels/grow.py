"""Helpers for units that grow in a device step."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def table_of(p_plan, p_like):
    """Addresses in a plan's row: representations of p_like's dtype, members, offsets."""
    p_reps = tl.multiple_of(tl.load(p_plan + 2).to(tl.pointer_type(p_like.dtype.element_ty)), 16)
    p_members = tl.load(p_plan + 4).to(tl.pointer_type(tl.int32))
    return p_reps, p_members, tl.load(p_plan + 6).to(tl.pointer_type(tl.int32))


@triton.jit
def add_members(p_members, first, tokens, moved, T: tl.constexpr):
    """members[tokens + i] = first + i for the tokens that have left the window."""
    i = 0
    while i < moved:
        o_t = i + tl.arange(0, T)
        tl.store(p_members + tokens + o_t, first + o_t, mask=o_t < moved)
        i += T

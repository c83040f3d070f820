"""What all units have in common as they grow in a device step."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_members(p_members, first, tokens, moved, T: tl.constexpr):
    """members[tokens + i] = first + i for the tokens that have left."""
    i = 0
    while i < moved:
        o_t = i + tl.arange(0, T)
        tl.store(p_members + tokens + o_t, first + o_t, mask=o_t < moved)
        i += T

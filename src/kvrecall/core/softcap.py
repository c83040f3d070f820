"""Soft capping of logits in kernels, as Gemma 2 does it."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def capped(b_logit, softcap):
    """softcap * tanh(b_logit / softcap)."""
    return softcap * (1.0 - 2.0 / (tl.exp(2.0 * b_logit / softcap) + 1.0))

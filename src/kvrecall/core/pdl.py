"""Kernels in a chain: the way of the next one to the GPU overlaps with the end of the one in front.

That is NVIDIA's programmatic dependent launch. The next kernel is let go at the end only: its programs would otherwise sit on
the multiprocessors, waiting, while the kernel in front still has work to distribute.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def begin(PDL: tl.constexpr):
    """Waits for all that the kernel in front wrote; what kernels before that one wrote may be read earlier."""
    if PDL:
        gdc_wait()


@triton.jit
def end(PDL: tl.constexpr):
    """Lets the next kernel be launched, which sees all the same what is still written here."""
    if PDL:
        gdc_launch_dependents()

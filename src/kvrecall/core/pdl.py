"""Programmatic dependent launch (NVIDIA): the launch of the next kernel in a chain overlaps with the end of the previous one.

The next kernel is allowed to start only at the end. Otherwise its programs would occupy multiprocessors and wait while the
previous kernel still has programs to start.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def begin(PDL: tl.constexpr):
    """Waits for the writes of the previous kernel. Writes of earlier kernels may be read before this call."""
    if PDL:
        gdc_wait()


@triton.jit
def end(PDL: tl.constexpr):
    """Allows the next kernel to start. After its `begin` it still sees all writes of this kernel."""
    if PDL:
        gdc_launch_dependents()

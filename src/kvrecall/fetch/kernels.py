"""Direct reads of page-locked host rows by the GPU (ParisKV section 4.2.3): one program copies one K|V row, no staging.

Dialect: capitals are sizes, `i_` indices, `o_` offsets, `p_` pointers, `m_` masks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def gather_kernel(p_source, p_heads, p_ids, p_slots, p_out, start, HELD, W: tl.constexpr, BW: tl.constexpr):
    """Row (heads[i], ids[i] - start) of source `[H_kv, HELD, W]` -> row slots[i] of out `[·, W]`, if the segment holds it."""
    i_row = tl.program_id(0)
    i_id = tl.load(p_ids + i_row) - start
    if (i_id >= 0) & (i_id < HELD):
        o_w = tl.arange(0, BW)
        m_w = o_w < W
        o_row = (tl.load(p_heads + i_row) * HELD + i_id).to(tl.int64) * W
        b_row = tl.load(p_source + o_row + o_w, mask=m_w)  # [W]
        tl.store(p_out + tl.load(p_slots + i_row).to(tl.int64) * W + o_w, b_row, mask=m_w)


def gather_rows(segments: list[tuple[int, Tensor]], heads: Tensor, ids: Tensor, slots: Tensor, out: Tensor) -> None:
    """Copies rows (heads[i], ids[i]) into out's rows slots[i]; the three are int64 `[n]` on the GPU.

    segments: (first id, whole segment `[H_kv, held, 2, D]` in page-locked host memory). out: contiguous `[·, 2, D]` on the GPU.
    Moves n rows of 2 D numbers over the bus, each as one contiguous read.
    """
    if not len(ids):
        return
    words = out.view(torch.int32).view(-1, out.shape[-2] * out.shape[-1] * out.element_size() // 4)
    width = words.shape[1]
    for start, segment in segments:
        source = segment.view(torch.int32)
        gather_kernel[(len(ids),)](
            source, heads, ids, slots, words, start, segment.shape[1], W=width, BW=triton.next_power_of_2(width), num_warps=1
        )

"""The address of a row in host memory, for kernels: one look-up in the block table of its sequence.

Dialect: capitals are sizes, `i_` indices, `o_` offsets, `p_` pointers, `m_` masks, `b_` blocks.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def row_offset(p_table, b_id, m_id, i_kv, HEADS, BLOCK: tl.constexpr, D: tl.constexpr):
    """Offsets in elements, int64, of the rows `[2, D]` of tokens b_id >= 0 of one KV head.

    table int32 `[W]`: the blocks of the sequence, `[HEADS, BLOCK, 2, D]` each; see `core.structs.HostTable`. m_id: mask; the
    other entries get the offset of some row of the layer.
    """
    b_block = tl.load(p_table + b_id // BLOCK, mask=m_id, other=0).to(tl.int64)
    return ((b_block * HEADS + i_kv) * BLOCK + tl.where(m_id, b_id % BLOCK, 0)) * (2 * D)

"""The kernel of `host_keys`.

Dialect: capitals are sizes, `i_` indices, `o_` offsets, `p_` pointers, `m_` masks, `b_` blocks.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["tokens"])
def keys_kernel(p_rows, p_keys, tokens, HEAD, TOKEN, OUT, D: tl.constexpr, BD: tl.constexpr, T: tl.constexpr):
    """Keys that lie HEAD and TOKEN numbers apart -> `[H_kv, n, D]`, whose heads lie OUT apart.

    Program (number, KV head): T tokens, and those that are as many times T behind as there are numbers.
    """
    i_h, o_d = tl.program_id(1).to(tl.int64), tl.arange(0, BD)
    for i_t in range(tl.program_id(0), tl.cdiv(tokens, T), tl.num_programs(0)):
        o_t = tl.arange(0, T).to(tl.int64) + i_t * T
        m_key = (o_t < tokens)[:, None] & (o_d < D)[None, :]
        b_key = tl.load(p_rows + i_h * HEAD + o_t[:, None] * TOKEN + o_d[None, :], mask=m_key)
        tl.store(p_keys + i_h * OUT + o_t[:, None] * D + o_d[None, :], b_key, mask=m_key)

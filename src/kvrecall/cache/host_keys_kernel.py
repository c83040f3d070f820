"""The kernel of `host_keys`.

Dialect: capitals are sizes, `i_` indices, `o_` offsets, `p_` pointers, `m_` masks, `b_` blocks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvrecall.core.triton import load_keys


@triton.jit(do_not_specialize=["start", "tokens"])
def keys_kernel(
    p_pool, p_table, p_keys, start, tokens, HEADS, OUT, BLOCK: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, T: tl.constexpr
):
    """Copies the keys of the tokens from `start` on to `[HEADS, n, D]` with head stride OUT, in elements. pool, table: as in
    `load_keys`.

    Program (i, KV head): T tokens from i T on, then every (number of programs) x T tokens further.
    """
    i_h, o_d = tl.program_id(1), tl.arange(0, BD)
    for i_t in range(tl.program_id(0), tl.cdiv(tokens, T), tl.num_programs(0)):
        o_t = tl.arange(0, T) + i_t * T
        b_key = load_keys(p_pool, p_table, start + o_t, o_t < tokens, i_h, HEADS, BLOCK, D, BD)
        p_key = p_keys + i_h.to(tl.int64) * OUT + o_t.to(tl.int64)[:, None] * D + o_d[None, :]
        tl.store(p_key, b_key.to(p_keys.dtype.element_ty), mask=(o_t < tokens)[:, None] & (o_d < D)[None, :])

"""The kernel of `host_keys`.

Dialect: capitals are sizes, `i_` indices, `o_` offsets, `p_` pointers, `m_` masks, `b_` blocks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvrecall.core.host_rows import THREADS, widened


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["p_scales"])
def keys_kernel(p_rows, p_scales, p_keys, tokens, HEAD, TOKEN, SCALES, OUT, D: tl.constexpr, BD: tl.constexpr, T: tl.constexpr):
    """Copies keys with strides HEAD and TOKEN to `[H_kv, n, D]` with head stride OUT, in elements. Rows in uint8 are e4m3, with
    scales fp32 `[n, 2]` of key and value, whose head stride is SCALES; see `core.host_rows`.

    Program (i, KV head): T tokens from i T on, then every (number of programs) x T tokens further.
    """
    i_h, o_d = tl.program_id(1).to(tl.int64), tl.arange(0, BD)
    for i_t in range(tl.program_id(0), tl.cdiv(tokens, T), tl.num_programs(0)):
        o_t = tl.arange(0, T).to(tl.int64) + i_t * T
        m_key = (o_t < tokens)[:, None] & (o_d < D)[None, :]
        b_key = tl.load(p_rows + i_h * HEAD + o_t[:, None] * TOKEN + o_d[None, :], mask=m_key)
        if p_rows.dtype.element_ty == tl.uint8:
            X: tl.constexpr = max(1, THREADS // T)
            p_scale = p_scales + i_h * SCALES + 2 * o_t[:, None] + tl.zeros([1, X], tl.int32)
            b_scale = tl.load(p_scale, mask=(o_t < tokens)[:, None], other=0.0)  # [T, X]
            b_scale = tl.sum(tl.where((tl.arange(0, X) == 0)[None, :], b_scale, 0.0), 1)
            b_key = (widened(b_key) * b_scale[:, None]).to(p_keys.dtype.element_ty)
        tl.store(p_keys + i_h * OUT + o_t[:, None] * D + o_d[None, :], b_key, mask=m_key)

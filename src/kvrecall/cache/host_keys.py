"""Reads keys without values from host memory: a kernel reads them in place, half the bytes of the rows.

Dialect: capitals are sizes, `i_` indices, `o_` offsets, `p_` pointers, `m_` masks, `b_` blocks.
"""

# Kernel launches take arguments that type checkers do not know.
# pyright: reportCallIssue=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kvrecall.core.launch import cdiv, launch, next_power_of_2
from kvrecall.core.structs import HostTable
from kvrecall.core.triton import load_keys

_TOKENS = 64
"""Tokens that a program reads at a time: 16 KB at D = 128 in 16 bits."""
_PROGRAMS = 64
"""Programs of all heads together: 1 MB in flight keeps the bus busy. Few programs leave room for kernels of other streams,
which would otherwise wait for the last of thousands of programs to start."""


def copy_keys(table: HostTable, start: int, keys: Tensor) -> None:
    """Copies the keys of the tokens from `start` on into keys `[H_kv, n, D]` of a GPU, on its current stream. The host does not
    wait.

    table: of one sequence, for the GPU. The keys of a head must be contiguous.
    """
    heads, tokens, dim = keys.shape
    assert keys.stride(2) == 1 and keys.stride(1) == dim
    if tokens:
        launch(keys_kernel, (min(cdiv(tokens, _TOKENS), max(1, _PROGRAMS // heads)), heads))(
            table.pool, table.blocks, keys, start, tokens, heads, keys.stride(0), BLOCK=table.block_size, D=dim,
            BD=next_power_of_2(dim), T=_TOKENS, num_warps=4,
        )  # fmt: skip


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

"""Direct reads of page-locked host rows by the GPU (ParisKV section 4.2.3): one program copies one K|V row, no staging.

Dialect: capitals are sizes, `i_` indices, `o_` offsets, `p_` pointers, `m_` masks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvrecall.core.launch import launch
from kvrecall.core.structs import HostTable
from kvrecall.core.triton import load_row, row_offset


@triton.jit
def gather_kernel(
    p_pool, p_table, p_heads, p_ids, p_slots, p_out, HEADS, BLOCK: tl.constexpr, W: tl.constexpr, BW: tl.constexpr
):
    """Row (heads[i], ids[i] >= 0) of pool `[blocks, HEADS, BLOCK, W]`, W even -> row slots[i] of out `[·, W]`.

    table int32 `[·]`: the blocks of the sequence, see `row_offset`.
    """
    i_row = tl.program_id(0)
    i_id = tl.load(p_ids + i_row)
    o_w = tl.arange(0, BW)
    m_w = o_w < W
    o_row = row_offset(p_table, i_id, i_id >= 0, tl.load(p_heads + i_row), HEADS, BLOCK, W // 2)
    b_row = tl.load(p_pool + o_row + o_w, mask=m_w)  # [W]
    tl.store(p_out + tl.load(p_slots + i_row).to(tl.int64) * W + o_w, b_row, mask=m_w)


@triton.jit
def gather_small_kernel(
    p_pool, p_table, p_heads, p_ids, p_slots, p_out, HEADS, BLOCK: tl.constexpr, D: tl.constexpr, BD: tl.constexpr
):
    """As `gather_kernel`, from rows in eight bits -> rows `[2, D]` of out `[·, 2, D]`, in its dtype."""
    i_row = tl.program_id(0)
    o_d = tl.arange(0, BD)
    b_k, b_v = load_row(p_pool, p_table, tl.load(p_ids + i_row), tl.load(p_heads + i_row), HEADS, p_out, BLOCK, D, BD)
    p_row = p_out + tl.load(p_slots + i_row).to(tl.int64) * (2 * D) + o_d
    tl.store(p_row, b_k, mask=o_d < D)
    tl.store(p_row + D, b_v, mask=o_d < D)


def gather_rows(table: HostTable, heads: Tensor, ids: Tensor, slots: Tensor, out: Tensor) -> None:
    """Copies rows (heads[i], ids[i]) into out's rows slots[i]; the three are int64 `[n]` on the GPU, and no id is negative.

    table: of one sequence, its rows page-locked. out: contiguous `[·, 2, D]` on the GPU, of the rows' dtype, or of any for rows
    in eight bits. Moves n rows of 2 D numbers over the bus, each as one contiguous read.
    """
    if not len(ids):
        return
    heads_in_all = table.rows.shape[1]
    if table.fp8:
        dim = out.shape[2]
        launch(gather_small_kernel, (len(ids),))(
            table.pool, table.blocks, heads, ids, slots, out, heads_in_all, BLOCK=table.block_size, D=dim,
            BD=triton.next_power_of_2(dim), num_warps=1,
        )  # fmt: skip
        return
    words = out.view(torch.int32).flatten(1)
    width = words.shape[1]
    launch(gather_kernel, (len(ids),))(
        table.rows.view(torch.int32), table.blocks, heads, ids, slots, words, heads_in_all, BLOCK=table.block_size,
        W=width, BW=triton.next_power_of_2(width), num_warps=1,
    )  # fmt: skip

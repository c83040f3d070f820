"""Stores the summary of a device step's token in the token's block."""

from __future__ import annotations

import triton
import triton.language as tl

from kvrecall.cache.slot_kernels import IDLE, ZONE_FIELDS


@triton.jit(do_not_specialize=["TABLE"])
def row_kernel(
    p_new, p_rows, p_zone, p_table, HEADS, TABLE, NUMBERS, BLOCK: tl.constexpr, WIDTH: tl.constexpr, BW: tl.constexpr
):
    """Program (sequence and KV head): copies row i_bh of new `[BH, WIDTH]` to the place of this step's token.

    rows in blocks `[HEADS, BLOCK, WIDTH]`, two of them NUMBERS apart; table int32 `[B, TABLE]`: the blocks of each sequence;
    zone as in `cache.slot_kernels`. A slot without a sequence stores nothing.
    """
    i_bh = tl.program_id(0)
    p_zone += i_bh * ZONE_FIELDS
    if tl.load(p_zone + 6) == IDLE:
        return
    number, o_w = tl.load(p_zone + 5), tl.arange(0, BW)
    block = tl.load(p_table + (i_bh // HEADS) * TABLE + number // BLOCK).to(tl.int64)
    p_row = p_rows + block * NUMBERS + ((i_bh % HEADS) * BLOCK + number % BLOCK) * WIDTH + o_w
    tl.store(p_row, tl.load(p_new + i_bh * WIDTH + o_w, mask=o_w < WIDTH), mask=o_w < WIDTH)

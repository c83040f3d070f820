"""Addresses of codes in blocks, by a sequence's block table.

A part of the codes of all blocks is `[blocks, HEADS, BLOCK, WIDTH]`; two blocks are NUMBERS elements apart, a multiple of
sixteen. A program's tokens begin at a multiple of their number, so they lie in one block or in several whole ones. If these are
few, each is looked up once, first of all (`look_up`), because a load inside a loop would delay the loads of codes. If blocks
are small, each token is looked up. Entries after the end of a table are not read and count as block 0.
"""

# Loops over constants are resolved by the compiler.
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false

from __future__ import annotations

import triton
import triton.language as tl

_FEW = tl.constexpr(8)
"""Most blocks of a program that are looked up in advance."""


@triton.jit
def numbers_of(p_part, BYTES):
    """Distance of blocks in elements of a part's dtype; BYTES: in bytes."""
    return BYTES // (p_part.dtype.element_ty.primitive_bitwidth // 8)


@triton.jit
def one_block(p_table, TABLE, token, BLOCK: tl.constexpr):
    """The block of a token, or of each of several, int32."""
    o_place = token // BLOCK
    return tl.load(p_table + o_place, mask=o_place < TABLE, other=0)


@triton.jit
def look_up(p_table, TABLE, first, BLOCK: tl.constexpr, TOKENS: tl.constexpr):
    """The blocks of a program's tokens from `first` on, at most TOKENS; nothing if there may be too many."""
    COUNT: tl.constexpr = (TOKENS + BLOCK - 1) // BLOCK
    b_known = ()
    if COUNT <= _FEW:
        for i in tl.static_range(COUNT):
            b_known = b_known + (one_block(p_table, TABLE, first + i * BLOCK, BLOCK),)
    return b_known


@triton.jit
def blocks_of(b_known, p_table, TABLE, first, start, o_t, BLOCK: tl.constexpr, T: tl.constexpr):
    """The blocks of tokens first + start + o_t, 0 <= o_t < T, int32: one number if T tokens lie in one block, else of o_t's
    shape. start: a multiple of T. known: the result of `look_up` for the program's tokens from `first` on."""
    if BLOCK >= T:
        o_t = 0
    FEW: tl.constexpr = len(b_known)
    if FEW == 0:
        b_block = one_block(p_table, TABLE, first + start + o_t, BLOCK)
    else:
        b_block = b_known[0]
        for i in tl.static_range(1, FEW):
            b_block = tl.where(o_t + start >= i * BLOCK, b_known[i], b_block)
    return b_block


@triton.jit
def begin_of(b_block, NUMBERS, i_h, start, BLOCK: tl.constexpr, T: tl.constexpr, WIDTH: tl.constexpr):
    """Offset in elements, int64, of the code of token `start`, the first of T, or (BLOCK < T) of the first code of each token's
    block."""
    row = i_h * BLOCK
    if BLOCK >= T:
        row += start % BLOCK
    return b_block.to(tl.int64) * NUMBERS + row * WIDTH


@triton.jit
def rows_of(o_t, BLOCK: tl.constexpr, T: tl.constexpr, WIDTH: tl.constexpr):
    """Offset in elements from `begin_of` to the codes of tokens o_t."""
    if BLOCK < T:
        o_t = o_t % BLOCK
    return o_t * WIDTH

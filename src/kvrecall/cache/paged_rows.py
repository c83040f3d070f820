"""Rows of the sequences of a pass over an engine's blocks, as kernels see them, in named groups.

A row is in one of three places: among the tokens of the pass, in the window's pages, or in its block.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from kvrecall.core.triton import row_offset


class Fresh(NamedTuple):
    """The tokens of a pass: keys k and values v `[T, H_kv, D]`. K_TOKEN, V_TOKEN: elements from one token to the next."""

    k: Any
    v: Any
    K_TOKEN: Any
    V_TOKEN: Any


class Recent(NamedTuple):
    """The window's pages, of PAGE tokens, and int32 `[·, TABLE]`, those of each row of the batch. BLOCK, HEAD, TOKEN: strides
    in elements."""

    rows: Any
    table: Any
    TABLE: Any
    PAGE: Any
    BLOCK: Any
    HEAD: Any
    TOKEN: Any


class Held(NamedTuple):
    """Rows in blocks `[blocks, HEADS, BLOCK, 2, D]`, with NEAR and FAR as in `core.structs.Pool`, and int32 `[·, TABLE]`, the
    blocks of each row of the batch."""

    pool: Any
    NEAR: Any
    FAR: Any
    table: Any
    TABLE: Any
    HEADS: Any


class HeadRows(NamedTuple):
    """Rows of one sequence and KV head.

    k, v: keys and values of its tokens in the pass, from position `new` on, K_TOKEN and V_TOKEN elements apart. pages: its
    pages of the window, which hold positions from `recent` to `new` - 1. blocks: its blocks, which hold all earlier positions.
    """

    k: Any
    v: Any
    K_TOKEN: Any
    V_TOKEN: Any
    new: Any
    window: Recent
    pages: Any
    recent: Any
    held: Held
    blocks: Any
    i_kv: Any


@triton.jit
def summarise_nothing(own, i_piece, newest, rows, BLOCK: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    """How a step's kernel summarises a new token, at position `newest`, in pieces; here not at all. own: arguments of the
    index, a named group without other groups in it, in which Triton 3.6 would lose constants. rows: a `HeadRows`."""


@triton.jit
def head_rows(fresh, window, held, i_token, before, newest, ends, i_row, i_kv, D: tl.constexpr):
    """`HeadRows` of a decoded token: number i_token of the pass, at position `newest`, after `before` others of its sequence.
    ends: first position in the window. i_row: row of the batch. Numbers of tokens and rows are int64."""
    first = i_token - before
    return HeadRows(
        fresh.k + first * fresh.K_TOKEN + i_kv * D, fresh.v + first * fresh.V_TOKEN + i_kv * D, fresh.K_TOKEN,
        fresh.V_TOKEN, newest - before, window, window.table + i_row * window.TABLE, ends, held,
        held.table + i_row * held.TABLE, i_kv,
    )  # fmt: skip


@triton.jit
def window_place(window, p_pages, position, i_kv, m_row):
    """Offsets int64 of positions' rows in the window's pages, in elements. pages: of one sequence."""
    b_block = tl.load(p_pages + position // window.PAGE, mask=m_row, other=0).to(tl.int64)
    return b_block * window.BLOCK + i_kv * window.HEAD + tl.where(m_row, position % window.PAGE, 0) * window.TOKEN


@triton.jit
def load_part(rows, o_r, m_r, VALUES: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    """Keys or values `[R, BD]` of positions o_r, from where they are; rows: a `HeadRows`."""
    o_d = tl.arange(0, BD)
    m_d, SIDE = (o_d < D)[None, :], D if VALUES else 0
    m_new, m_recent, m_held = m_r & (o_r >= rows.new), m_r & (o_r < rows.new) & (o_r >= rows.recent), m_r & (o_r < rows.new)
    m_held = m_held & (o_r < rows.recent)
    o_new = tl.where(m_new, o_r - rows.new, 0).to(tl.int64)
    p_new = rows.v + (o_new * rows.V_TOKEN)[:, None] if VALUES else rows.k + (o_new * rows.K_TOKEN)[:, None]
    b_row = tl.load(p_new + o_d[None, :], mask=m_new[:, None] & m_d, other=0.0)
    p_here = rows.window.rows + window_place(rows.window, rows.pages, o_r, rows.i_kv, m_recent)[:, None] + SIDE + o_d[None, :]
    b_row = tl.where(m_recent[:, None], tl.load(p_here, mask=m_recent[:, None] & m_d, other=0.0), b_row)
    p_held = rows.held.pool + held_offset(rows, o_r, m_held, BLOCK, D)[:, None] + SIDE + o_d[None, :]
    return tl.where(m_held[:, None], tl.load(p_held, mask=m_held[:, None] & m_d, other=0.0), b_row)


@triton.jit
def held_offset(rows, o_r, m_r, BLOCK: tl.constexpr, D: tl.constexpr):
    """`row_offset` of positions o_r in the blocks of a `HeadRows`."""
    held = rows.held
    return row_offset(rows.blocks, o_r, m_r, rows.i_kv, held.HEADS, BLOCK, D, NEAR=held.NEAR, FAR=held.FAR)


@triton.jit
def run_start(position, PHASE, EVERY, BLOCK: tl.constexpr):
    """The first position of the run of `position`: rows go to blocks in runs of at most EVERY, which end at blocks, too.

    EVERY is a power of two. PHASE shifts the ends of runs, so that not all layers write in the same step.
    """
    return position - tl.minimum((position + PHASE) % EVERY, position % BLOCK)


@triton.jit
def store_run(rows, start, stop, BLOCK: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, W: tl.constexpr):
    """Copies the rows of positions start .. stop - 1, all in one block and none stored there yet, to it; W at a time. rows: a
    `HeadRows`."""
    o_d = tl.arange(0, 2 * BD)  # a row, key and value
    for i in range(start, stop, W):
        o_r = i + tl.arange(0, W)
        m_r = o_r < stop
        o_new = tl.where(m_r & (o_r >= rows.new), o_r - rows.new, 0).to(tl.int64)
        p_value = rows.v + (o_new * rows.V_TOKEN)[:, None] - D
        p_new = tl.where((o_d < D)[None, :], rows.k + (o_new * rows.K_TOKEN)[:, None], p_value)
        o_recent = window_place(rows.window, rows.pages, o_r, rows.i_kv, m_r & (o_r < rows.new))
        p_row = tl.where((o_r >= rows.new)[:, None], p_new, rows.window.rows + o_recent[:, None]) + o_d[None, :]
        m_row = m_r[:, None] & (o_d < 2 * D)[None, :]
        o_held = held_offset(rows, o_r, m_r, BLOCK, D)
        tl.store(rows.held.pool + o_held[:, None] + o_d[None, :], tl.load(p_row, mask=m_row), mask=m_row)

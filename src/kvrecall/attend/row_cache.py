"""The row cache: rows that searches selected stay on the device, so that a step reads from the host only what recent steps did
not need.

The row of a token has `WAYS` places, by its position. If none of them has it, it takes the one that was used least recently.
So a step finds rows and replaces them in one pass, without an order of all rows. Answers never depend on what is kept: a row is
the same wherever it lies.
"""

# Kernel launches take arguments that type checkers do not know.
# pyright: reportCallIssue=false, reportIndexIssue=false, reportArgumentType=false, reportOperatorIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvrecall.core.launch import cdiv
from kvrecall.core.triton import FAR_BIAS, load_rows

WAYS = 8
"""Places that a row may take. Of real selections .01 to .03 fewer hit than if each could take any (`benchmarks.row_cache`)."""


class CacheArguments(NamedTuple):
    """Of all sequences and KV heads: rows `[·, SETS * WAYS, 2, D]`, and without the last two dimensions ids int32, positions of
    the rows, -1 for none, and used int64, twice the last step that read a row, plus 1 if that step claimed its place for
    another one. now int64 `[1]`: the number of the step, > 0. since int64, by sequence: rows of earlier steps belong to another
    one."""

    ids: Any
    used: Any
    rows: Any
    now: Any
    since: Any
    SETS: Any


@triton.jit
def cached_rows(
    p_pool, p_table, cache, i_place, b_id, i_kv, HEADS,
    BLOCK: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, WAYS: tl.constexpr, NEAR=0, FAR=FAR_BIAS,
    SPLIT: tl.constexpr = False,
):  # fmt: skip
    """K and V `[R, BD]` of tokens b_id `[R]` (-1: none) of one KV head, and how many were read from the host.

    pool `[blocks, HEADS, BLOCK, 2, D]`: the layer's rows; table: the sequence's blocks, see `load_rows`. All blocks are on the
    host, or with SPLIT those from number NEAR on (`core.structs.Pool`); others need no cache. cache: a `CacheArguments`.
    i_place: the sequence's number there, < 0: none. Without WAYS nothing is kept.

    Several programs, of one sequence's drafts, may want the same place. A place that was read in this step is not replaced, and
    one that was replaced in this step is not read: who marks it first has it, the others read from the host.
    """
    o_d = tl.arange(0, BD)
    m_d, m_r = (o_d < D)[None, :], b_id >= 0
    m_far = m_r
    if SPLIT:
        m_far = m_r & (tl.load(p_table + b_id // BLOCK, mask=m_r, other=0) >= NEAR)
    m_host, m_read = m_far, m_r
    if WAYS > 0:
        # With fewer numbers than threads, a compiler may load them twice, and another program's mark may come in between.
        tl.static_assert(b_id.shape[0] * WAYS >= 128, "four warps")
        now, since = tl.load(cache.now) * 2, tl.load(cache.since + i_place, mask=i_place >= 0, other=0) * 2
        m_any, o_way = m_r & (i_place >= 0), tl.arange(0, WAYS)
        m_cached = m_any & m_far
        o_set = (i_place.to(tl.int64) * HEADS + i_kv) * cache.SETS + tl.maximum(b_id, 0) % cache.SETS
        o_all = o_set[:, None] * WAYS + o_way[None, :]  # [R, WAYS]
        b_kept = tl.load(cache.ids + o_all, mask=m_any[:, None], other=-1)
        b_used = tl.load(cache.used + o_all, mask=m_any[:, None], other=0)
        b_way = tl.max(tl.where((b_kept == b_id[:, None]) & (b_used >= since), o_way[None, :], -1), 1)
        m_known = b_way >= 0
        b_oldest = tl.min(tl.where(b_used == tl.min(b_used, 1)[:, None], o_way[None, :], WAYS), 1)
        o_place = o_set * WAYS + tl.where(m_known, b_way, b_oldest)
        b_mark = tl.where(m_known, now, now + 1)
        b_before = tl.atomic_max(cache.used + o_place, b_mark, mask=m_cached, sem="relaxed")
        m_kept, m_keep = m_known & m_cached & (b_before <= now), m_cached & (b_way < 0) & (b_before < now)
        m_host = m_far & (m_kept == 0)
        m_read = m_r & (m_kept == 0)
    b_k, b_v = load_rows(p_pool, p_table, b_id, m_r, m_read, i_kv, HEADS, cache.rows, BLOCK, D, BD, NEAR, FAR)
    if WAYS > 0:
        m_kept_row, m_keep_row = m_kept[:, None] & m_d, m_keep[:, None] & m_d
        p_row = cache.rows + o_place[:, None] * (2 * D) + o_d[None, :]
        b_k = tl.where(m_kept_row, tl.load(p_row, mask=m_kept_row, other=0.0), b_k)
        b_v = tl.where(m_kept_row, tl.load(p_row + D, mask=m_kept_row, other=0.0), b_v)
        tl.store(p_row, b_k, mask=m_keep_row)
        tl.store(p_row + D, b_v, mask=m_keep_row)
        tl.store(cache.ids + o_place, b_id, mask=m_keep)
    return b_k, b_v, tl.sum(m_host.to(tl.int32), 0)


class RowCache:
    """Rows of one layer for some sequences, on the device. `ways`: as `cached_rows` wants it."""

    def __init__(self, sequences: int, heads: int, rows: int, dim: int, like: Tensor) -> None:
        """rows: per sequence and KV head, rounded up; 0: nothing is kept. like: a tensor with dtype and device of the rows."""
        self.sets, self.ways = cdiv(rows, WAYS), WAYS if rows else 0
        sizes = sequences, heads, self.sets * WAYS
        self._ids = torch.full(sizes, -1, dtype=torch.int32, device=like.device)
        self._used = torch.zeros(sizes, dtype=torch.int64, device=like.device)
        self._rows = torch.zeros(*sizes, 2, dim, dtype=like.dtype, device=like.device)

    def forget(self, sequences: list[int]) -> None:
        """Drops the rows of some sequences."""
        for each in sequences:
            self._ids[each] = -1

    def arguments(self, now: Tensor, since: Tensor) -> CacheArguments:
        """For kernels, see there."""
        return CacheArguments(self._ids, self._used, self._rows, now, since, self.sets)

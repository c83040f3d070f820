"""One decode step's attention at fixed addresses: selected rows on the host and rows on the device, in one launch.

A selected row is read from page-locked host memory (ParisKV section 4.2.3), or from the row cache if recent steps selected it
too; LouisKV section 4.2 keeps those of the step before. Static rows (PRKV section 4.1) lie before the window, which is a ring.
Sizes are read from device memory, so one captured graph serves all steps. Bytes: 4 D per row and KV head in 16-bit types, once
for all query heads of a group, over the bus for fetched rows.
"""

# Kernel launches take arguments that type checkers do not know.
# pyright: reportCallIssue=false, reportIndexIssue=false, reportArgumentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvrecall.attend.kernels import readers_first, step_part
from kvrecall.attend.row_cache import CacheArguments, RowCache
from kvrecall.core.launch import cdiv, launch, next_power_of_2, overlapping
from kvrecall.core.structs import AttentionParams, HostTable
from kvrecall.core.triton import begin, end
from kvrecall.merge.kernels import merge_step

_CHOSEN_ROWS, _CHOSEN_PARTS = 16, 48
"""Selected rows per program; few, to spread reads of the host, unless one program could not merge all parts."""
_RESIDENT_ROWS = 64


@triton.jit(do_not_specialize=["TABLE"])
def attend_kernel(
    p_queries, p_keys, p_values, p_rows, p_zone, p_bad, p_ids, p_pool, p_table, cache, p_read, p_out, p_lse, scaling, softcap,
    HEADS, TABLE, CAPACITY, FRONT, ZONE, PAIRS, K,
    BLOCK: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, G: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
    CHOSEN: tl.constexpr, PARTS: tl.constexpr, CAP: tl.constexpr, WAYS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (sequence and KV head, part), see `readers_first` and `step_part`. zone int32 `[bh, ZONE]`, table int32
    `[b, TABLE]`."""
    begin(PDL)
    i_bh, i_p = readers_first(tl.program_id(0), PAIRS, CHOSEN)
    i_b, i_kv = i_bh // HEADS, i_bh % HEADS
    step_part(p_queries, p_keys, p_values, p_rows, p_zone + i_bh * ZONE, p_bad + i_b, p_ids, p_pool, p_table + i_b * TABLE,
              cache, p_read + i_b, p_out, p_lse, scaling, softcap, i_bh, i_kv, i_p, HEADS, CAPACITY, FRONT, K, BLOCK, D, BD, G,
              R, W, CHOSEN, PARTS, CAP, WAYS)  # fmt: skip
    end(PDL)


class StepAttention:
    """Rows of one layer on the device, and the parts of an attention over them and selected rows."""

    chosen_rows, resident_rows, warps = _CHOSEN_ROWS, _RESIDENT_ROWS, 4
    """Selected rows and window rows of a part, and its warps."""

    def __init__(
        self, table: HostTable, query_heads: int, front: int, ring: int, top_k: int, kept: int, like: Tensor, others: int = 0,
        spread: bool = False,
    ) -> None:  # fmt: skip
        """table: page-locked host rows of the B sequences; address and blocks must not change. front: rows before the window.
        ring: most rows of the window. kept: rows per KV head that the row cache keeps, 0: none. like: any tensor on the device
        with the rows' dtype. others: parts of the merge that another launch fills. spread: `_CHOSEN_ROWS` selected rows per
        program for any number of parts."""
        b, heads, dim, device = len(table.blocks), table.rows.shape[1], table.rows.shape[4], like.device
        self.top_k, self.front, self.ring, self.table = top_k, front, ring, table
        self._dim, self._group, self._options = dim, query_heads // heads, overlapping(device)
        while not spread and cdiv(top_k, self.chosen_rows) > _CHOSEN_PARTS:
            self.chosen_rows *= 2
        self.chosen_parts = cdiv(top_k, self.chosen_rows)
        self.parts = self.chosen_parts + cdiv(front + ring, _RESIDENT_ROWS)
        """Parts of the selection, then of the window; the others come after them."""

        def zeros(*size: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(*size, dtype=dtype, device=device)

        self.rows = zeros(b, heads, front + ring, 2, dim, dtype=like.dtype)
        """`[B, H_kv, front + ring, 2, D]`: rows before the window, then the window's ring."""
        self.cache, self._since = RowCache(b, heads, kept, dim, like), zeros(b, dtype=torch.int64)
        self.read, self.bad = zeros(b, dtype=torch.int64), zeros(b)
        """read: rows read from the host. bad: not 0 for sequences with a row that was not finite."""
        self.out = zeros(b, query_heads, self.parts + others, dim, dtype=torch.float32)
        self.lse = zeros(b, query_heads, self.parts + others, dtype=torch.float32)
        """out fp32 `[B, H_q, parts + others, D]` and lse without D: the parts for `merge`."""

    def forget(self, sequences: list[int]) -> None:
        """Drops the cached rows of some sequences and restarts their count of rows read."""
        self.cache.forget(sequences)
        for b in sequences:
            self.read[b].zero_()  # to assign a number is a copy that waits

    def launch(
        self, queries: Tensor, keys: Tensor, values: Tensor, ids: Tensor, zone: Tensor, now: Tensor, params: AttentionParams,
        total: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Attends for queries `[B, H_q, 1, D]` and the new token's keys and values `[B, H_kv, 1, D]`, all contiguous.

        ids: int32 `[B, H_kv, K]`, padded with -1. zone: int32 `[B H_kv, ·]`, see `step_part`. now: int64 `[1]`, the step's
        number, > 0. total: fp32 `[B, H_q]`, filled with the log-sum-exp. Returns `[B, H_q, 1, D]`.
        """
        (b, heads, capacity), k, table = self.rows.shape[:3], self.top_k, self.table
        launch(attend_kernel, (b * heads * self.parts,))(
            queries, keys, values, self.rows, zone, self.bad, ids, table.pool, table.blocks, self.cached(now), self.read,
            self.out, self.lse, params.scaling, params.softcap, heads, table.blocks.stride(0), capacity, self.front,
            zone.stride(0), b * heads, k,
            BLOCK=table.block_size, D=self._dim, BD=next_power_of_2(self._dim), G=self._group, R=self.chosen_rows,
            W=_RESIDENT_ROWS, CHOSEN=self.chosen_parts, PARTS=self.parts,
            CAP=params.softcap != 0, WAYS=self.cache.ways, num_warps=self.warps, **self._options,
        )  # fmt: skip
        return self.merge(queries, params, total)

    def cached(self, now: Tensor) -> CacheArguments:
        """The row cache for a kernel of step `now`."""
        return self.cache.arguments(now, self._since)

    def merge(self, queries: Tensor, params: AttentionParams, total: Tensor | None = None) -> Tensor:
        """Merges all parts, for queries `[B, H_q, 1, D]`. total: as in `launch`."""
        return merge_step(queries, self.out, self.lse, params.sink_logits, total)

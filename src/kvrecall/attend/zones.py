"""Decode attention to whole retrieval zones in blocks on the device, in one launch for all sequences, without a gather.

A program reads its share of a zone in steps of a few rows of one block, with one look-up per step, and loads the rows of the
next steps while it computes. In a captured step the rows before the zone and the new token are one more part. All sums are
fp32. Bytes: 2 D numbers per row and KV head, once, for all query heads of a group.
"""

# Kernel launches take arguments that type checkers do not know.
# pyright: reportCallIssue=false, reportIndexIssue=false, reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvrecall.attend.kernels import flag_odd
from kvrecall.core.launch import cdiv, launch, next_power_of_2, overlapping
from kvrecall.core.structs import AttentionParams, HostTable, Partial
from kvrecall.core.triton import begin, capped, end
from kvrecall.merge.kernels import merge_splits, merge_step

_MOST_PARTS, _MOST_STEP_PARTS = 256, 47
"""Parts of a zone, in one attention and in a captured step, where one program merges them with the part of other rows. 47 is
the fastest number from 16 to 66 for one sequence of 128K and eight KV heads on an H200, and within 2 % of it for other
cases."""
_PROGRAMS = 512
"""Programs that keep all multiprocessors of a large GPU busy, if a zone has enough rows."""
_ROW_BYTES = 8192
"""Bytes of keys that one step of a program's loop reads, at most."""
_STAGES, _WARPS = 6, 4
"""Loop steps in flight; many if steps are small, because each waits for its block's id first."""


@triton.jit
def fold(b_q, b_k, b_v, m_r, b_peak, b_total, b_sum, scaling, softcap, CAP: tl.constexpr):
    """Adds rows `[R, BD]` to the running softmax of queries `[BG, BD]`: peak and total `[BG]`, sum `[BG, BD]`.

    m_r: mask of valid rows. Weights are rounded to the values' dtype, sums are fp32.
    """
    b_logit = tl.dot(b_q.to(b_k.dtype), tl.trans(b_k), input_precision="ieee") * scaling  # [BG, R]
    if CAP:
        b_logit = capped(b_logit, softcap)
    b_logit = tl.where(m_r[None, :], b_logit, float("-inf"))
    b_high = tl.maximum(b_peak, tl.max(b_logit, 1))
    b_base = tl.where(b_high == float("-inf"), 0.0, b_high)
    b_p = tl.exp(b_logit - b_base[:, None])
    b_old = tl.exp(b_peak - b_base)
    b_total = b_total * b_old + tl.sum(b_p, 1)
    b_sum = b_sum * b_old[:, None] + tl.dot(b_p.to(b_v.dtype), b_v, input_precision="ieee")
    return b_high, b_total, b_sum


@triton.jit
def fold_tile(p_tile, m_r, b_q, b_peak, b_total, b_sum, scaling, softcap, D: tl.constexpr, BD: tl.constexpr, R: tl.constexpr,
              CAP: tl.constexpr):  # fmt: skip
    """`fold` of the rows `[R, 2, D]` at p_tile."""
    o_r, o_d = tl.arange(0, R), tl.arange(0, BD)
    m_row = m_r[:, None] & (o_d < D)[None, :]
    p_row = p_tile + o_r[:, None] * (2 * D) + o_d[None, :]
    b_k = tl.load(p_row, mask=m_row, other=0.0)  # [R, BD]
    b_v = tl.load(p_row + D, mask=m_row, other=0.0)
    return fold(b_q, b_k, b_v, m_r, b_peak, b_total, b_sum, scaling, softcap, CAP)


@triton.jit
def fold_zone(p_rows, p_table, i_kv, i_p, length, b_q, b_peak, b_total, b_sum, scaling, softcap, HEADS, BLOCK: tl.constexpr,
              D: tl.constexpr, BD: tl.constexpr, R: tl.constexpr, PARTS: tl.constexpr, CAP: tl.constexpr,
              STAGES: tl.constexpr):  # fmt: skip
    """`fold` of part number i_p of PARTS of the first `length` tokens of one KV head's zone.

    rows `[blocks, HEADS, BLOCK, 2, D]`; table int32 `[W]`: the blocks of the sequence. BLOCK is a multiple of R.
    """
    share = tl.cdiv(tl.cdiv(length, PARTS), R) * R
    first = i_p * share
    stop = tl.minimum(first + share, length)
    # One loop over all blocks, because each loop starts without loads in flight.
    for i_r in tl.range(first, stop, R, num_stages=STAGES):
        block = tl.load(p_table + i_r // BLOCK).to(tl.int64)
        p_tile = p_rows + ((block * HEADS + i_kv) * BLOCK + i_r % BLOCK) * (2 * D)
        b_peak, b_total, b_sum = fold_tile(p_tile, i_r + tl.arange(0, R) < stop, b_q, b_peak, b_total, b_sum, scaling, softcap,
                                           D, BD, R, CAP)  # fmt: skip
    return b_peak, b_total, b_sum


@triton.jit
def begin_part(p_queries, i_bh, D: tl.constexpr, BD: tl.constexpr, G: tl.constexpr):
    """Queries `[BG, BD]` of one KV head from `[BH, G, D]`, and an empty running softmax."""
    BG: tl.constexpr = max(16, triton.next_power_of_2(G))
    o_g, o_d = tl.arange(0, BG), tl.arange(0, BD)
    m_q = (o_g < G)[:, None] & (o_d < D)[None, :]
    b_q = tl.load(p_queries + (i_bh.to(tl.int64) * G + o_g[:, None]) * D + o_d[None, :], mask=m_q, other=0.0)
    return b_q, tl.full([BG], float("-inf"), tl.float32), tl.zeros([BG], tl.float32), tl.zeros([BG, BD], tl.float32)


@triton.jit
def end_part(p_out, p_lse, i_bh, i_p, b_peak, b_total, b_sum, D: tl.constexpr, BD: tl.constexpr, G: tl.constexpr,
             PARTS: tl.constexpr):  # fmt: skip
    """Stores a softmax as part number i_p of out fp32 `[BH, G, PARTS, D]`, lse `[BH, G, PARTS]`."""
    BG: tl.constexpr = max(16, triton.next_power_of_2(G))
    o_g, o_d = tl.arange(0, BG), tl.arange(0, BD)
    o_out = (i_bh.to(tl.int64) * G + o_g) * PARTS + i_p
    b_mass = tl.where(b_total > 0, b_total, 1.0)
    m_q = (o_g < G)[:, None] & (o_d < D)[None, :]
    tl.store(p_out + o_out[:, None] * D + o_d[None, :], b_sum / b_mass[:, None], mask=m_q)
    tl.store(p_lse + o_out, tl.where(b_total > 0, b_peak + tl.log(b_mass), float("-inf")), mask=o_g < G)


@triton.jit(do_not_specialize=["TABLE"])
def zone_kernel(
    p_queries, p_rows, p_table, p_lengths, p_out, p_lse, scaling, softcap, HEADS, TABLE,
    BLOCK: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, G: tl.constexpr, R: tl.constexpr, PARTS: tl.constexpr,
    CAP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program (sequence and KV head, part): see `fold_zone`. table int32 `[B, TABLE]`, lengths int32 `[B]`."""
    i_bh, i_p = tl.program_id(0), tl.program_id(1)
    i_b = i_bh // HEADS
    b_q, b_peak, b_total, b_sum = begin_part(p_queries, i_bh, D, BD, G)
    length = tl.load(p_lengths + i_b)
    b_peak, b_total, b_sum = fold_zone(p_rows, p_table + i_b * TABLE, i_bh % HEADS, i_p, length, b_q, b_peak, b_total, b_sum,
                                       scaling, softcap, HEADS, BLOCK, D, BD, R, PARTS, CAP, STAGES)  # fmt: skip
    end_part(p_out, p_lse, i_bh, i_p, b_peak, b_total, b_sum, D, BD, G, PARTS)


@triton.jit(do_not_specialize=["TABLE"])
def zone_step_kernel(
    p_queries, p_keys, p_values, p_front, p_rows, p_table, p_counts, p_active, p_bad, p_out, p_lse, scaling, softcap, HEADS,
    TABLE, FRONT,
    BLOCK: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, G: tl.constexpr, R: tl.constexpr, ZONES: tl.constexpr,
    CAP: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (sequence and KV head, part): ZONES parts of the zone, then one part of the rows before it `[BH, FRONT, 2, D]`
    and the step's token `[BH, D]`.

    counts int32 `[B]`: tokens stored before this step; the first FRONT lie before the zone, the others in blocks. The step's
    token is attended to where the model put it, and stored if active[b] is not 0; bad[b] becomes 1 if it is not finite.
    """
    begin(PDL)
    i_bh, i_p = tl.program_id(0), tl.program_id(1)
    i_b, i_kv = i_bh // HEADS, i_bh % HEADS
    PARTS: tl.constexpr = ZONES + 1
    count = tl.load(p_counts + i_b)
    p_own_table = p_table + i_b * TABLE
    b_q, b_peak, b_total, b_sum = begin_part(p_queries, i_bh, D, BD, G)
    if i_p < ZONES:
        b_peak, b_total, b_sum = fold_zone(p_rows, p_own_table, i_kv, i_p, tl.maximum(count - FRONT, 0), b_q, b_peak, b_total,
                                           b_sum, scaling, softcap, HEADS, BLOCK, D, BD, R, ZONES, CAP, STAGES)  # fmt: skip
    else:
        p_own = p_front + i_bh.to(tl.int64) * FRONT * (2 * D)
        o_r, o_d = tl.arange(0, R), tl.arange(0, BD)
        stop = tl.minimum(count, FRONT)
        for i_r in range(0, stop, R):
            b_peak, b_total, b_sum = fold_tile(p_own + i_r * (2 * D), i_r + o_r < stop, b_q, b_peak, b_total, b_sum, scaling,
                                               softcap, D, BD, R, CAP)  # fmt: skip
        m_r = o_r == 0
        o_new = i_bh.to(tl.int64) * D + o_d
        b_new_k, b_new_v = tl.load(p_keys + o_new, mask=o_d < D, other=0.0), tl.load(p_values + o_new, mask=o_d < D, other=0.0)
        b_k, b_v = tl.where(m_r[:, None], b_new_k[None, :], 0.0), tl.where(m_r[:, None], b_new_v[None, :], 0.0)  # [R, BD]
        b_peak, b_total, b_sum = fold(b_q, b_k, b_v, m_r, b_peak, b_total, b_sum, scaling, softcap, CAP)
        flag_odd(p_bad + i_b, b_new_k, b_new_v)
        place = tl.maximum(count - FRONT, 0)
        block = tl.load(p_own_table + place // BLOCK).to(tl.int64)
        later = (block * HEADS + i_kv) * BLOCK + place % BLOCK
        p_new = tl.where(count < FRONT, p_own + count * (2 * D), p_rows + later * (2 * D)) + o_d
        m_stored = (o_d < D) & (tl.load(p_active + i_b) != 0)
        tl.store(p_new, b_new_k, mask=m_stored)
        tl.store(p_new + D, b_new_v, mask=m_stored)
    end_part(p_out, p_lse, i_bh, i_p, b_peak, b_total, b_sum, D, BD, G, PARTS)
    end(PDL)


def attend_zones(
    queries: Tensor, table: HostTable, lengths: Tensor, longest: int, scaling: float, softcap: float = 0.0
) -> Partial:
    """As `reference.attend_zones`; queries `[B, H_q, 1, D]` on the rows' device."""
    (b, heads, _, dim), kv_heads = queries.shape, table.rows.shape[1]
    rows = _rows_at_once(table)
    # A power of two, so that few sizes are compiled; parts without rows are empty.
    wanted = max(1, min(cdiv(longest, rows), cdiv(_PROGRAMS, b * kv_heads)))
    parts = min(_MOST_PARTS, next_power_of_2(wanted))
    out = queries.new_empty(b * heads, parts, dim, dtype=torch.float32)
    lse = queries.new_empty(b * heads, parts, dtype=torch.float32)
    with torch.cuda.device_of(queries):  # Triton launches on the current device, which may be another one
        launch(zone_kernel, (b * kv_heads, parts))(
            queries.contiguous(), table.rows, table.blocks, lengths, out, lse, scaling, softcap, kv_heads,
            table.blocks.stride(0), BLOCK=table.block_size, D=dim, BD=next_power_of_2(dim), G=heads // kv_heads, R=rows,
            PARTS=parts, CAP=softcap != 0, STAGES=_STAGES, num_warps=_WARPS,
        )  # fmt: skip
        merged, total = merge_splits(out, lse)
    return Partial(merged.view(b, heads, 1, dim), total.view(b, heads, 1))


class ZoneAttention:
    """Captured steps over whole zones: the rows before them, and the parts of the attention, at fixed addresses."""

    def __init__(self, table: HostTable, query_heads: int, front: int, tokens: int) -> None:
        """table: all blocks of the layer on the device, and each sequence's blocks. front: tokens before a zone. tokens: most
        tokens of a zone, window included."""
        (_, heads, _, _, dim), rows, b = table.rows.shape, table.rows, len(table.blocks)
        device, self.table = rows.device, table
        self.front = torch.zeros(b, heads, front, 2, dim, dtype=rows.dtype, device=device)
        """`[B, H_kv, front, 2, D]`"""
        self.counts = torch.zeros(b, dtype=torch.int32, device=device)
        """int32 `[B]`: tokens stored so far, before the zone and in blocks."""
        self.active = torch.zeros(b, dtype=torch.int32, device=device)
        """int32 `[B]`: 1 for slots with a sequence, 0 for others, which store nothing."""
        self.bad = torch.zeros(b, dtype=torch.int32, device=device)
        """Not 0 for sequences with a row that was not finite."""
        self._rows_at_once = _rows_at_once(self.table)
        parts = 1 + max(1, min(_MOST_STEP_PARTS, cdiv(tokens, self._rows_at_once)))
        self._out = torch.zeros(b, query_heads, parts, dim, dtype=torch.float32, device=device)
        self._lse = torch.zeros(b, query_heads, parts, dtype=torch.float32, device=device)

    def launch(self, queries: Tensor, keys: Tensor, values: Tensor, params: AttentionParams) -> Tensor:
        """Attends for queries `[B, H_q, 1, D]`, and stores keys and values `[B, H_kv, 1, D]`, all contiguous."""
        (b, heads, front, _, dim), parts, table = self.front.shape, self._lse.shape[2], self.table
        launch(zone_step_kernel, (b * heads, parts))(
            queries, keys, values, self.front, table.rows, table.blocks, self.counts, self.active, self.bad, self._out,
            self._lse, params.scaling, params.softcap, heads, table.blocks.stride(0), front, BLOCK=table.block_size, D=dim,
            BD=next_power_of_2(dim), G=queries.shape[1] // heads, R=self._rows_at_once, ZONES=parts - 1,
            CAP=params.softcap != 0, STAGES=_STAGES, num_warps=_WARPS, **overlapping(queries.device),
        )  # fmt: skip
        out = merge_step(queries, self._out, self._lse, params.sink_logits)
        self.counts += self.active
        return out


def _rows_at_once(table: HostTable) -> int:
    row_bytes = next_power_of_2(table.rows.shape[4]) * table.rows.element_size()
    return min(table.block_size, max(16, min(64, _ROW_BYTES // row_bytes)))

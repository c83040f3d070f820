"""Decode attention by Triton to rows that are fetched in the same pass, and held until the next search.

A step that searched reads its selected rows straight from page-locked host memory (ParisKV section 4.2.3) and keeps them where
the next steps find them (LouisKV section 4.2); which of the two a step does is read from device memory, so one captured graph
serves both. Static rows (PRKV section 4.1) lie between the selected and the resident ones.
Bytes: 4 D per row and KV head in 16-bit types, once for all query heads of a group, over the bus for fetched rows.
"""

# A launch takes what only Triton knows.
# pyright: reportCallIssue=false, reportIndexIssue=false, reportArgumentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvrecall.attend.kernels import attend_block
from kvrecall.launch import cdiv, next_power_of_2

_PART_ROWS = 16
"""Rows per program of the split attention."""


@triton.jit
def fetching_kernel(
    p_queries, p_keys, p_values, p_rows, p_lengths, p_hosts, p_ids, p_fire, p_out, p_lse, scaling, softcap, HEADS, K, CAPACITY,
    D: tl.constexpr, BD: tl.constexpr, G: tl.constexpr, R: tl.constexpr, CHOSEN: tl.constexpr, PARTS: tl.constexpr,
    CAP: tl.constexpr,
):  # fmt: skip
    """Program (sequence and KV head, part): CHOSEN parts of the K selected rows, then parts of the others.

    rows `[BH, K + CAPACITY, 2, D]`: the selected rows, then those that lie on the device, of which lengths[b, 0] are real. The
    new token `[BH, D]` is attended from where the model put it and stored as row lengths[b, 1] of these. ids int32 `[BH, K]`,
    -1 for none. hosts int64 `[B, 2]`: address of the pool `[H_kv, room, 2, D]` in p_rows' dtype, and its room. fire[b]: whether
    the selection is new. Writes parts out `[BH, G, PARTS, D]` and lse `[BH, G, PARTS]`, fp32.
    """
    i_bh, i_p = tl.program_id(0), tl.program_id(1)
    i_b, i_kv = i_bh // HEADS, i_bh % HEADS
    o_r, o_d = tl.arange(0, R), tl.arange(0, BD)
    m_d = (o_d < D)[None, :]
    p_own = p_rows + i_bh.to(tl.int64) * (K + CAPACITY) * (2 * D)
    if i_p < CHOSEN:
        o_k = i_p * R + o_r
        b_id = tl.load(p_ids + i_bh * K + o_k, mask=o_k < K, other=-1)
        m_r = b_id >= 0
        m_row = m_r[:, None] & m_d
        p_kept = p_own + o_k[:, None] * (2 * D) + o_d[None, :]
        if tl.load(p_fire + i_b) != 0:
            p_pool = tl.load(p_hosts + i_b * 2).to(tl.pointer_type(p_rows.dtype.element_ty))
            p_pool = tl.multiple_of(p_pool, 16)  # 16 bytes are read at a time only where that is known
            p_row = p_pool + (i_kv * tl.load(p_hosts + i_b * 2 + 1) + b_id)[:, None] * (2 * D) + o_d[None, :]
            b_k, b_v = tl.load(p_row, mask=m_row, other=0.0), tl.load(p_row + D, mask=m_row, other=0.0)
            tl.store(p_kept, b_k, mask=m_row)
            tl.store(p_kept + D, b_v, mask=m_row)
        else:
            b_k, b_v = tl.load(p_kept, mask=m_row, other=0.0), tl.load(p_kept + D, mask=m_row, other=0.0)
    else:
        o_w = (i_p - CHOSEN) * R + o_r
        m_r = o_w < tl.load(p_lengths + i_b * 2)
        m_row = m_r[:, None] & m_d
        p_row = p_own + (K + o_w)[:, None] * (2 * D) + o_d[None, :]
        b_k, b_v = tl.load(p_row, mask=m_row, other=0.0), tl.load(p_row + D, mask=m_row, other=0.0)
        m_new = (o_w == tl.load(p_lengths + i_b * 2 + 1))[:, None] & m_d
        o_new = i_bh.to(tl.int64) * D + o_d[None, :]
        b_new_k, b_new_v = tl.load(p_keys + o_new, mask=m_new, other=0.0), tl.load(p_values + o_new, mask=m_new, other=0.0)
        b_k, b_v = tl.where(m_new, b_new_k, b_k), tl.where(m_new, b_new_v, b_v)
        tl.store(p_row, b_new_k, mask=m_new)
        tl.store(p_row + D, b_new_v, mask=m_new)
    o_out = i_bh.to(tl.int64) * G * PARTS
    attend_block(p_queries + i_bh.to(tl.int64) * G * D, p_out + o_out * D, p_lse + o_out, i_p, b_k,
                 b_v, m_r, scaling, softcap, D, BD, G, PARTS, CAP)  # fmt: skip


class FetchingAttention:
    """Rows at fixed addresses and the parts of an attention over them, for batches of one layer."""

    def __init__(self, resident: Tensor, pools: list[Tensor], top_k: int, query_heads: int) -> None:
        """resident: `[B, H_kv, CAPACITY, 2, D]`, copied behind room for the selected rows. pools: page-locked host rows
        `[H_kv, room, 2, D]` of the same dtype, one per sequence, which must stay where they are."""
        b, heads, capacity, _, dim = resident.shape
        self._heads, self._group, self._dim, self._top_k, self._capacity = heads, query_heads // heads, dim, top_k, capacity
        self._pools, device = pools, resident.device
        self.rows = torch.cat([resident.new_zeros(b, heads, top_k, 2, dim), resident], 2)
        """`[B, H_kv, K + CAPACITY, 2, D]`: selected rows, then those on the device."""
        self._hosts = torch.tensor([[p.data_ptr(), p.shape[1]] for p in pools], device=device)
        self.parts = cdiv(top_k, _PART_ROWS) + cdiv(capacity, _PART_ROWS)
        self.out = torch.zeros(b, query_heads, self.parts, dim, dtype=torch.float32, device=device)
        self.lse = torch.zeros(b, query_heads, self.parts, dtype=torch.float32, device=device)

    def launch(
        self, queries: Tensor, keys: Tensor, values: Tensor, ids: Tensor, fire: Tensor, lengths: Tensor, scaling: float,
        softcap: float = 0.0,
    ) -> None:  # fmt: skip
        """Attends for queries `[B, H_q, D]` and the new token's keys and values `[B, H_kv, D]`, all contiguous.

        ids: int32 `[B, H_kv, K]`, padded with -1. fire: int32 `[B]`, 0 where the rows of the last fetch serve. lengths: int32
        `[B, 2]`, resident rows with the new token, and its row. Fills `out` and `lse`, to be merged.
        """
        fetching_kernel[(queries.shape[0] * self._heads, self.parts)](
            queries, keys, values, self.rows, lengths, self._hosts, ids, fire, self.out, self.lse, scaling, softcap,
            self._heads, self._top_k, self._capacity,
            D=self._dim, BD=next_power_of_2(self._dim), G=self._group, R=_PART_ROWS, CHOSEN=cdiv(self._top_k, _PART_ROWS),
            PARTS=self.parts, CAP=softcap != 0, num_warps=4,
        )  # fmt: skip

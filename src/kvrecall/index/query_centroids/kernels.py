"""CTkvr's recall and rerank on a GPU: nearest centroids, and exact scores of keys that lie in page-locked host memory.

Bytes per search and KV head: the centroids of its query heads, C D numbers each, in device memory; the recalled keys, R D
numbers, over the bus.
"""

# Kernel launches take arguments that type checkers do not know.
# pyright: reportCallIssue=false, reportIndexIssue=false, reportArgumentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvrecall.core.launch import cdiv, launch, next_power_of_2
from kvrecall.core.structs import HostTable
from kvrecall.core.triton import load_keys
from kvrecall.index.query_centroids.lists import LEAST_NORM as _LEAST
from kvrecall.index.query_centroids.lists import CentroidLists, Recalled

LEAST_NORM = tl.constexpr(_LEAST)
_CENTROIDS, _IDS = 64, 1024
"""Centroids per program of the cosines, and ids of a list that are copied at a time."""
_KEYS = 16
"""Keys per program of the exact scores."""


def recall(lists: CentroidLists, query: Tensor, kv_heads: int, count: int) -> Recalled:
    """As `lists.recall`, by two launches; the lists come in order of similarity. Does not synchronise."""
    (heads, dim), (centroids, length) = query.shape, lists.ids.shape[1:]
    recalled = min(count, centroids)
    assert lists.queries.is_contiguous() and lists.ids.is_contiguous()
    scores, unit, norms = (query.new_empty(heads, n, dtype=torch.float32) for n in (centroids, dim, 1))
    picked = lists.ids.new_empty(kv_heads, recalled, length)
    with torch.cuda.device_of(query):  # Triton launches on the current device, which may be another one
        launch(cosine_kernel, (cdiv(centroids, _CENTROIDS), heads))(
            query.contiguous(), lists.queries, scores, unit, norms, centroids, D=dim, BD=next_power_of_2(dim), R=_CENTROIDS,
            num_warps=4,
        )  # fmt: skip
        launch(recall_kernel, (recalled, kv_heads))(
            scores, lists.ids, picked, centroids, length, recalled, G=heads // kv_heads, BC=next_power_of_2(centroids), BL=_IDS,
            num_warps=4,
        )  # fmt: skip
    return Recalled(unit, norms, picked)


@triton.jit
def cosine_kernel(p_queries, p_centroids, p_scores, p_unit, p_norms, C, D: tl.constexpr, BD: tl.constexpr, R: tl.constexpr):
    """Program (R centroids, query head): cosines fp32 `[H_q, C]` of queries `[H_q, D]` with centroids `[H_q, C, D]` of norm 1;
    and the queries divided by their norms, fp32 `[H_q, D]`, and the norms `[H_q]`."""
    i_c, i_h = tl.program_id(0), tl.program_id(1).to(tl.int64)
    o_c, o_d = i_c * R + tl.arange(0, R), tl.arange(0, BD)
    m_c, m_d = o_c < C, o_d < D
    b_q = tl.load(p_queries + i_h * D + o_d, mask=m_d, other=0.0).to(tl.float32)
    norm = tl.maximum(tl.sqrt_rn(tl.sum(b_q * b_q, 0)), LEAST_NORM)
    b_unit = tl.div_rn(b_q, norm)
    if i_c == 0:
        tl.store(p_unit + i_h * D + o_d, b_unit, mask=m_d)
        tl.store(p_norms + i_h, norm)
    p_row = p_centroids + (i_h * C + o_c)[:, None] * D + o_d[None, :]
    b_c = tl.load(p_row, mask=m_c[:, None] & m_d[None, :], other=0.0).to(tl.float32)  # [R, BD]
    tl.store(p_scores + i_h * C + o_c, tl.sum(b_c * b_unit[None, :], 1), mask=m_c)


@triton.jit
def recall_kernel(p_scores, p_lists, p_picked, C, LENGTH, NEAR, G: tl.constexpr, BC: tl.constexpr, BL: tl.constexpr):
    """Program (i, KV head): copies the list of the i-th nearest of C centroids, equal ones in order of their numbers, from
    int32 `[H_kv, C, LENGTH]` to picked `[H_kv, NEAR, LENGTH]`. scores fp32 `[H_kv, G, C]`: the largest of the group counts."""
    i_n, i_kv = tl.program_id(0), tl.program_id(1).to(tl.int64)
    o_c = tl.arange(0, BC)
    b_s = tl.full([BC], float("-inf"), tl.float32)
    for g in tl.static_range(G):
        b_s = tl.maximum(b_s, tl.load(p_scores + (i_kv * G + g) * C + o_c, mask=o_c < C, other=float("-inf")))
    nearest = 0
    for _ in range(i_n + 1):
        nearest = tl.min(tl.where(b_s == tl.max(b_s, 0), o_c, C - 1), 0)  # C - 1: no comparison with nan is true
        b_s = tl.where(o_c == nearest, float("-inf"), b_s)
    p_list, p_to = p_lists + (i_kv * C + nearest) * LENGTH, p_picked + (i_kv * NEAR + i_n) * LENGTH
    for first in range(0, LENGTH, BL):
        o_l = first + tl.arange(0, BL)
        tl.store(p_to + o_l, tl.load(p_list + o_l, mask=o_l < LENGTH, other=-1), mask=o_l < LENGTH)


@triton.jit
def score_rows_kernel(
    p_queries, p_pool, p_table, p_ids, p_scores, HEADS, COUNT, BLOCK: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    G: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Program (R ids, KV head): scores fp32 `[HEADS, G, COUNT]` of ids int32 `[HEADS, COUNT]`; scores of ids -1 are not
    written.

    pool `[blocks, HEADS, BLOCK, 2, D]`: only keys are read; table int32 `[·]`: the blocks of the sequence, see `load_keys`.
    queries fp32 `[HEADS, G, D]`.
    """
    i_part, i_kv = tl.program_id(0), tl.program_id(1)
    o_r, o_d = i_part * R + tl.arange(0, R), tl.arange(0, BD)
    b_id = tl.load(p_ids + i_kv * COUNT + o_r, mask=o_r < COUNT, other=-1)
    m_r = b_id >= 0
    m_d = o_d < D
    b_key = load_keys(p_pool, p_table, b_id, m_r, i_kv, HEADS, BLOCK, D, BD)  # [R, BD]
    for g in tl.static_range(G):
        b_q = tl.load(p_queries + (i_kv * G + g) * D + o_d, mask=m_d, other=0.0)
        p_score = p_scores + (i_kv * G + g).to(tl.int64) * COUNT + o_r
        tl.store(p_score, tl.sum(b_key * b_q[None, :], 1), mask=m_r)


def score_rows(queries: Tensor, table: HostTable, ids: Tensor) -> Tensor:
    """Exact inner products fp32 `[H_kv, G, R]` of queries fp32 `[H_kv, G, D]` with the keys of `ids` int32 `[H_kv, R]`.

    table: of one sequence, with page-locked rows. Entries of ids -1 are -inf. Does not synchronise.
    """
    heads, group, dim = queries.shape
    count = ids.shape[1]
    out = torch.full((heads, group, count), float("-inf"), device=queries.device, dtype=torch.float32)
    launch(score_rows_kernel, (cdiv(count, _KEYS), heads))(
        queries.contiguous(), table.pool, table.blocks, ids.contiguous(), out, heads, count,
        BLOCK=table.block_size, D=dim, BD=next_power_of_2(dim), G=group, R=_KEYS, num_warps=4,
    )  # fmt: skip
    return out

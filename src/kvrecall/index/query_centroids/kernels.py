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

from kvrecall.core.host_rows import load_keys
from kvrecall.core.launch import cdiv, next_power_of_2
from kvrecall.core.structs import HostTable
from kvrecall.index.unit_kernels.search import GpuUnitSearch, UnitKind, plan_row

_KEYS = 16
"""Keys per program of the exact scores."""


class NearestCentroids:
    """Scratch of `lists.nearest` by kernels, for one sequence: every centroid is a unit of one token."""

    def __init__(self, centroids: Tensor, kv_heads: int, count: int) -> None:
        """centroids: `[H_q, C, D]` of norm 1; may be written to, must not move. count: centroids to find, C'."""
        self.centroids, self.count = centroids, count
        heads, number, dim = centroids.shape
        ints = {"dtype": torch.int32, "device": centroids.device}
        self._each = torch.arange(number + 1, **ints)  # members and offsets of units of one token
        kind = UnitKind(volume=False, ordered=True, per_query_head=True)
        self._search = GpuUnitSearch(1, kv_heads, heads // kv_heads, dim, "max", kind, count, number, centroids)
        each = self._each.expand(heads, -1)
        row = plan_row(centroids, each[:, :number], each, self._search.scores[0])
        self._plan = torch.tensor([row], dtype=torch.int64, device=centroids.device)
        self._fire = torch.ones(1, **ints)

    def find(self, unit: Tensor) -> Tensor:
        """As `lists.nearest`, for queries of norm 1, fp32 `[H_q, D]`: ascending int64 `[H_kv, min(C', C)]`."""
        self._search.launch(unit.unsqueeze(0), self._plan, self._fire, 1.0, self.count)
        return self._search.ids[0, :, : min(self.count, self.centroids.shape[1])].long()


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
    out = torch.full((heads, group, count), float("-inf"), device=queries.device)
    score_rows_kernel[(cdiv(count, _KEYS), heads)](
        queries.contiguous(), table.pool, table.blocks, ids.contiguous(), out, heads, count,
        BLOCK=table.block_size, D=dim, BD=next_power_of_2(dim), G=group, R=_KEYS, num_warps=4,
    )  # fmt: skip
    return out


def distinct(lists: Tensor, tokens: int, first_always: int, barred: Tensor | None) -> tuple[Tensor, Tensor]:
    """As `cpu.distinct`, on the device. Does not synchronise, so it has as many columns as there can be ids."""
    heads, device = lists.shape[0], lists.device
    most = min(tokens, lists[0].numel() + tokens - first_always)
    wanted = torch.zeros(heads, tokens + 1, dtype=torch.bool, device=device)
    flat = lists.flatten(1).long()
    wanted.scatter_(1, torch.where(flat < 0, tokens, flat), True)
    wanted[:, first_always:] = True
    if barred is not None:
        wanted.scatter_(1, barred.long(), False)
    wanted[:, tokens] = False
    place = wanted.cumsum(1, dtype=torch.int32)
    counts = place[:, -1].contiguous()
    ids = torch.full((heads, most + 1), -1, dtype=torch.int32, device=device)
    every = torch.arange(tokens + 1, dtype=torch.int32, device=device).expand(heads, -1)
    ids.scatter_(1, torch.where(wanted, place - 1, most).long(), every)  # unwanted ids all go to an extra column
    return ids[:, :most].contiguous(), counts

"""CTkvr's host side, by numba: deduplication of recalled lists and exact scores of rows where they lie.

Bytes per search and KV head: the recalled keys, R * D numbers; nothing is copied.
"""

# numba passes the typing context of an intrinsic itself; a type checker cannot know this.
# pyright: reportCallIssue=false

from __future__ import annotations

import numpy as np
import torch
from numba import njit, prange
from torch import Tensor

from kvrecall.core.numeric import as_bits, load_float, prefetch, row_number
from kvrecall.core.structs import HostTable
from kvrecall.select.cpu import top_k_of

_AHEAD = 8
_FAST = {"reassoc", "contract", "arcp", "nsz"}


def top_k_rows(scores: Tensor, k: int) -> Tensor:
    """Ascending positions int32 of the k largest of every row, ties to the lower one."""
    flat = scores.contiguous().flatten(0, -2)
    out = np.empty((flat.shape[0], min(k, flat.shape[1])), np.int32)
    if out.size:
        _top_k_rows(flat.numpy(), out)
    return torch.from_numpy(out).view(*scores.shape[:-1], out.shape[1])


def distinct(lists: Tensor, tokens: int, first_always: int, barred: Tensor | None) -> tuple[Tensor, Tensor]:
    """Union of id lists int32 `[H_kv, L, rho]` (-1: none) with all ids from `first_always` on, without `barred` `[H_kv, m]`.

    Returns ascending ids int32 `[H_kv, R]`, padded with -1, and counts int32 `[H_kv]`.
    """
    heads = lists.shape[0]
    most = min(tokens, lists[0].numel() + tokens - first_always) if heads else 0
    out = np.full((heads, most), -1, np.int32)
    counts = np.zeros(heads, np.int32)
    none = np.empty((heads, 0), np.int32)
    barred_ids = none if barred is None else barred.contiguous().numpy()
    _distinct(lists.contiguous().numpy(), tokens, first_always, barred_ids, out, counts)
    return torch.from_numpy(out[:, : max(int(counts.max()), 0)]), torch.from_numpy(counts)


def score_rows(queries: Tensor, table: HostTable, ids: Tensor, counts: Tensor) -> Tensor:
    """Exact inner products fp32 `[H_kv, G, R]` of queries fp32 `[H_kv, G, D]` with the rows of ascending ids `[H_kv, R]`.

    table: addresses of the sequence's rows, for the CPU. Entries after a head's count are undefined.
    """
    out = np.empty((queries.shape[0], queries.shape[1], ids.shape[1]), np.float32)
    bits, kind = as_bits(table.rows.view(-1, 2, table.rows.shape[4]))
    near, blocks = queries.contiguous().numpy(), table.blocks[0].numpy()
    _score(near, bits, kind, blocks, table.block_size, ids.contiguous().numpy(), counts.numpy(), out)
    return torch.from_numpy(out)


@njit(cache=True, parallel=True, nogil=True)
def _top_k_rows(scores, out):
    positions = np.arange(scores.shape[1])
    for row in prange(scores.shape[0]):
        top_k_of(scores[row], positions, out.shape[1], out[row])


@njit(cache=True, parallel=True, nogil=True)
def _distinct(lists, tokens, first_always, barred, out, counts):
    heads, count, longest = lists.shape
    for h in prange(heads):
        wanted = np.zeros(tokens, np.uint8)
        for c in range(count):
            for i in range(longest):
                if lists[h, c, i] >= 0:
                    wanted[lists[h, c, i]] = 1
        for i in range(first_always, tokens):
            wanted[i] = 1
        for i in range(barred.shape[1]):
            wanted[barred[h, i]] = 0
        at = 0
        for i in range(tokens):
            if wanted[i]:
                out[h, at] = i
                at += 1
        counts[h] = at


@njit(cache=True, parallel=True, nogil=True, fastmath=_FAST)
def _score(queries, rows, kind, blocks, size, ids, counts, out):
    heads, group, dim = queries.shape
    pieces = 4
    for task in prange(heads * pieces):
        piece = task % pieces
        h = task // pieces
        row = np.empty(dim, np.float32)
        base, stride = rows.ctypes.data, rows.strides[0]
        first, last = counts[h] * piece // pieces, counts[h] * (piece + 1) // pieces
        for i in range(first, last):
            if i + _AHEAD < last:
                prefetch(base + row_number(blocks, size, heads, h, ids[h, i + _AHEAD]) * stride)
            own = row_number(blocks, size, heads, h, ids[h, i])
            for d in range(dim):
                row[d] = load_float(rows[own, 0, d], kind)
            for g in range(group):
                total = np.float32(0.0)
                for d in range(dim):
                    total += row[d] * queries[h, g, d]
                out[h, g, i] = total

"""Scoring units and filling a budget with the best of them on the CPU, by numba; as `inner_products` and
`fill_budget` of `units`.

Bytes per search and KV head: the representations, once for all query heads of the group. Time: a heap of U units takes U, plus
log U for each selected unit; a sort would take U log U.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import njit, prange
from torch import Tensor

from kvrecall.core.numba import as_bits, load_float, parallel_njit

_PIECE = 512  # units per task


def inner_products(queries: Tensor, reps: Tensor) -> Tensor:
    """See there."""
    out = np.empty((*queries.shape[:2], reps.shape[1]), np.float32)
    bits, kind = as_bits(reps)
    _products(queries.double().contiguous().numpy(), bits, kind, out)
    return torch.from_numpy(out)


def fill_budget(ranked: Tensor, members: Tensor, offsets: Tensor, top_k: int) -> Tensor:
    """See there; members and offsets as in `Units`."""
    tokens = min(top_k, members.shape[1])
    out = np.full((*ranked.shape[:2], tokens), -1, np.int32)
    _fill(ranked.contiguous().numpy(), members.contiguous().numpy(), offsets.contiguous().numpy(), out)
    return torch.from_numpy(out)


@parallel_njit(fastmath={"reassoc", "contract"})
def _products(queries, reps, kind, out):
    heads, count, width = reps.shape
    pieces = (count + _PIECE - 1) // _PIECE
    for task in prange(heads * pieces):
        piece = task % pieces
        h = task // pieces
        row = np.empty(width, np.float64)
        for i in range(piece * _PIECE, min(count, (piece + 1) * _PIECE)):
            for d in range(width):
                row[d] = load_float(reps[h, i, d], kind)
            for g in range(queries.shape[1]):
                total = 0.0
                for d in range(width):
                    total += row[d] * queries[h, g, d]
                out[h, g, i] = total


@parallel_njit()
def _fill(ranked, members, offsets, out):
    heads, sets = ranked.shape[0], ranked.shape[1]
    for task in prange(heads * sets):
        s = task % sets
        h = task // sets
        _fill_one(ranked[h, s], members[h], offsets[h], out[h, s])


@njit(cache=True)
def _fill_one(scores, members, offsets, out):
    count = scores.shape[0]
    heap = np.arange(count)
    for at in range(count // 2 - 1, -1, -1):
        _sink(heap, scores, at, count)
    filled = 0
    while filled < out.shape[0] and count > 0:
        best = heap[0]
        count -= 1
        heap[0] = heap[count]
        _sink(heap, scores, 0, count)
        for i in range(offsets[best], offsets[best + 1]):
            if filled == out.shape[0]:
                break
            out[filled] = members[i]
            filled += 1


@njit(cache=True)
def _sink(heap, scores, at, count):
    moving = heap[at]
    while True:
        child = 2 * at + 1
        if child >= count:
            break
        if child + 1 < count and _before(scores, heap[child + 1], heap[child]):
            child += 1
        if not _before(scores, heap[child], moving):
            break
        heap[at] = heap[child]
        at = child
    heap[at] = moving


@njit(inline="always")
def _before(scores, one, other):
    return scores[one] > scores[other] or (scores[one] == scores[other] and one < other)

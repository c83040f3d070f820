"""Decode attention over a set of rows on the CPU, by numba: rows are read in place, once for all query heads of a group (bytes:
2 D numbers per row and KV head; torch's kernel reads them once per query head)."""

# numba passes the typing context of an intrinsic itself; a type checker cannot know this.
# pyright: reportCallIssue=false

from __future__ import annotations

import numpy as np
import torch
from numba import njit, prange
from torch import Tensor

from kvrecall.core.numeric import E4M3, as_bits, load_float, prefetch
from kvrecall.core.structs import Partial, Rows

_FAST = {"reassoc", "contract", "arcp", "nsz"}  # not nnan/ninf: -inf marks an empty part
_NO_SCALES = np.empty(0, np.float32)
_AHEAD = 4  # rows are prefetched this far ahead, because selected rows are scattered


def attend_rows(queries: Tensor, rows: Rows, scaling: float, softcap: float = 0.0) -> Partial:
    """As `reference.attend_rows`, for T_q = 1 and CPU tensors. Accumulates in fp32."""
    b, heads, _, dim = queries.shape
    out = torch.empty(b, heads, 1, dim)
    lse = torch.empty(b, heads, 1)
    bits, kind = as_bits(rows.kv.contiguous().flatten(2))
    # One layout of every array: one compilation.
    lengths = rows.lengths.contiguous().numpy()
    _attend(
        queries[:, :, 0].float().contiguous().numpy(),
        bits,
        kind,
        lengths,
        np.float32(scaling),
        np.float32(softcap),
        _NO_SCALES,
        out.numpy(),
        lse.numpy(),
    )
    return Partial(out, lse)


@njit(cache=True, parallel=True, nogil=True)
def _attend(queries, kv, kind, lengths, scaling, softcap, scales, out, lse):
    b_n, kv_heads = kv.shape[0], kv.shape[1]
    group, width = queries.shape[1] // kv_heads, 2 * queries.shape[2]
    for task in prange(b_n * kv_heads):
        h = task % kv_heads
        b = task // kv_heads
        own = slice(h * group, (h + 1) * group)
        places = np.arange(lengths[b, h]) * width
        attend_head(queries[b, own], kv[b, h], kind, places, scales, places, scaling, softcap, out[b, own, 0], lse[b, own, 0])


@njit(cache=True, nogil=True, fastmath=_FAST)
def attend_head(queries, rows, kind, places, scales, scale_places, scaling, softcap, out, lse):
    """One KV head: queries `[G, D]` over the rows `[2, D]` that begin at `places` of `rows`; writes out `[G, D]` and lse `[G]`.

    Rows in eight bits have the scales of key and value at `scale_places` of `scales` and behind it; see `numeric.row_place`."""
    group, dim = queries.shape
    n = places.shape[0]
    row = np.empty(dim, np.float32)
    logits = np.empty((group, n), np.float32)
    base, itemsize = rows.ctypes.data, rows.itemsize
    for i in range(n):
        if i + _AHEAD < n:
            later = base + np.int64(places[i + _AHEAD]) * itemsize
            prefetch(later)
            prefetch(later + dim * itemsize)
        own = rows[places[i] : places[i] + dim]
        for d in range(dim):
            row[d] = load_float(own[d], kind)
        scale = scales[scale_places[i]] * scaling if kind == E4M3 else scaling
        for g in range(group):
            total = np.float32(0.0)
            for d in range(dim):
                total += row[d] * queries[g, d]
            total *= scale
            if softcap > 0:
                total = softcap * np.tanh(total / softcap)
            logits[g, i] = total
    for g in range(group):
        peak = np.float32(-np.inf)
        for i in range(n):
            peak = max(peak, logits[g, i])
        total = np.float32(0.0)
        for i in range(n):
            weight = np.float32(np.exp(logits[g, i] - peak))
            logits[g, i] = weight
            total += weight
        lse[g] = peak + np.log(total) if n > 0 else np.float32(-np.inf)
        inverse = np.float32(1.0) / total if n > 0 else np.float32(0.0)
        for i in range(n):
            logits[g, i] *= inverse
    acc = np.zeros((group, dim), np.float32)
    for i in range(n):
        own = rows[places[i] + dim : places[i] + 2 * dim]
        for d in range(dim):
            row[d] = load_float(own[d], kind)
        scale = scales[scale_places[i] + 1] if kind == E4M3 else np.float32(1.0)
        for g in range(group):
            weight = logits[g, i] * scale
            for d in range(dim):
                acc[g, d] += weight * row[d]
    out[:, :] = acc

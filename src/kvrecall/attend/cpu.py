"""Decode attention over a set of rows on the CPU, by numba: rows are read in place, once for all query heads of a group (bytes:
2 D numbers per row and KV head; torch's kernel reads them once per query head)."""

# numba passes the typing context of an intrinsic itself; a type checker cannot know this.
# pyright: reportCallIssue=false

from __future__ import annotations

import numpy as np
import torch
from numba import njit, prange
from torch import Tensor

from kvrecall.core.numeric import as_bits, load_float, prefetch
from kvrecall.core.structs import Partial, Rows

_FAST = {"reassoc", "contract", "arcp", "nsz"}  # not nnan/ninf: -inf marks an empty part
_AHEAD = 4  # rows are prefetched this far ahead, because selected rows are scattered


def attend_rows(queries: Tensor, rows: Rows, scaling: float, softcap: float = 0.0) -> Partial:
    """As `reference.attend_rows`, for T_q = 1 and CPU tensors. Accumulates in fp32."""
    b, heads, _, dim = queries.shape
    out = torch.empty(b, heads, 1, dim)
    lse = torch.empty(b, heads, 1)
    bits, kind = as_bits(rows.kv)
    # One layout of every array: one compilation.
    lengths = rows.lengths.contiguous().numpy()
    _attend(
        queries[:, :, 0].float().contiguous().numpy(),
        bits,
        kind,
        lengths,
        np.float32(scaling),
        np.float32(softcap),
        out.numpy(),
        lse.numpy(),
    )
    return Partial(out, lse)


@njit(cache=True, parallel=True, nogil=True)
def _attend(queries, kv, kind, lengths, scaling, softcap, out, lse):
    b_n, kv_heads = kv.shape[0], kv.shape[1]
    group = queries.shape[1] // kv_heads
    for task in prange(b_n * kv_heads):
        h = task % kv_heads
        b = task // kv_heads
        own = slice(h * group, (h + 1) * group)
        places = np.arange(lengths[b, h])
        attend_head(queries[b, own], kv[b, h], kind, places, scaling, softcap, out[b, own, 0], lse[b, own, 0])


@njit(cache=True, nogil=True, fastmath=_FAST)
def attend_head(queries, rows, kind, places, scaling, softcap, out, lse):
    """One KV head: queries `[G, D]` over the rows `[·, 2, D]` at `places`; writes out `[G, D]` and lse `[G]`."""
    group, dim = queries.shape
    n = places.shape[0]
    row = np.empty(dim, np.float32)
    logits = np.empty((group, n), np.float32)
    base, stride = rows.ctypes.data, rows.strides[0]
    for i in range(n):
        if i + _AHEAD < n:
            later = base + np.int64(places[i + _AHEAD]) * stride
            prefetch(later)
            prefetch(later + stride // 2)
        for d in range(dim):
            row[d] = load_float(rows[places[i], 0, d], kind)
        for g in range(group):
            total = np.float32(0.0)
            for d in range(dim):
                total += row[d] * queries[g, d]
            total *= scaling
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
        for d in range(dim):
            row[d] = load_float(rows[places[i], 1, d], kind)
        for g in range(group):
            weight = logits[g, i]
            for d in range(dim):
                acc[g, d] += weight * row[d]
    out[:, :] = acc

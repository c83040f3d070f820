"""Decode attention over a set of rows on the CPU, by numba: rows are read in place, once for all query heads of a group (bytes:
2 D numbers per row and KV head; torch's kernel reads them once per query head).

`attend_selected` reads selected rows in host memory (CTkvr section 3.2): only the query and the result are copied between host
and device. It releases the interpreter's lock.

Threads share pieces of `PIECE` rows of each KV head, so that few heads keep many threads busy. The pieces of a head are merged
by their log-sum-exp. Sums do not depend on the number of threads.
"""

# numba passes the typing context of an intrinsic itself; a type checker cannot know this.
# pyright: reportCallIssue=false

from __future__ import annotations

import numpy as np
import torch
from numba import njit, prange
from torch import Tensor

from kvrecall.core.numba import (
    E4M3,
    PARALLEL,
    QUERIES,
    add_row,
    as_bits,
    as_words,
    first_pieces,
    from_word_order,
    in_word_order,
    load_row,
    numba_threads,
    numbers_per_word,
    parallel_njit,
    places_of,
    row_bits,
    score_keys,
)
from kvrecall.core.structs import HostTable, Partial, Rows

PIECE = 64
"""Rows that one task attends to."""
_FAST = {"reassoc", "contract", "arcp", "nsz"}  # not nnan/ninf: -inf marks an empty part
_NO_SCALES = np.empty(0, np.float32)
_AHEAD = 4  # rows are prefetched this far ahead, because selected rows are scattered


def attend_rows(queries: Tensor, rows: Rows, scaling: float, softcap: float = 0.0) -> Partial:
    """As `reference.attend_rows`, for T_q = 1 and CPU tensors. Accumulates in fp32."""
    b, heads, _, dim = queries.shape
    out = torch.empty(b, heads, 1, dim, dtype=torch.float32, device="cpu")
    lse = torch.empty(b, heads, 1, dtype=torch.float32, device="cpu")
    words, kind = as_words(*as_bits(rows.kv.contiguous().flatten(2)), dim)
    # One layout of every array: one compilation.
    lengths = rows.lengths.contiguous().numpy()
    ordered, factors = queries[:, :, 0].float().contiguous().numpy(), (np.float32(scaling), np.float32(softcap))
    _attend(ordered, words, kind, lengths, *factors, _NO_SCALES, out[:, :, 0].numpy(), lse[:, :, 0].numpy())
    return Partial(out, lse)


@parallel_njit()
def _attend(queries, kv, kind, lengths, scaling, softcap, scales, out, lse):
    b_n, kv_heads, dim = kv.shape[0], kv.shape[1], queries.shape[2]
    group, width = queries.shape[1] // kv_heads, 2 * dim // numbers_per_word(kind)
    longest = 0
    for b in range(b_n):
        for h in range(kv_heads):
            longest = max(longest, lengths[b, h])
    pieces = max(1, -(-longest // PIECE))
    outs, lses = np.empty((b_n, kv_heads, pieces, group, dim), np.float32), np.empty((b_n, kv_heads, pieces, group), np.float32)
    for task in prange(b_n * kv_heads * pieces):
        piece = task % pieces
        h = task // pieces % kv_heads
        b = task // (pieces * kv_heads)
        places = np.arange(piece * PIECE * width, min((piece + 1) * PIECE, lengths[b, h]) * width, width)
        own = slice(h * group, (h + 1) * group)
        attend_piece(
            queries[b, own], kv[b, h], kind, places, scales, places, scaling, softcap, outs[b, h, piece], lses[b, h, piece]
        )
    for b in range(b_n):
        for h in range(kv_heads):
            merge_pieces(outs[b, h], lses[b, h], out[b, h * group : (h + 1) * group], lse[b, h * group : (h + 1) * group])


@numba_threads()
def attend_selected(
    queries: Tensor, table: HostTable, ids: Tensor, counts: Tensor, scaling: float, softcap: float = 0.0
) -> Partial:
    """Attention of one query per head over the rows of `ids`.

    queries: `[H_q, D]`, any float dtype. table: addresses of the sequence's rows, for the CPU.
    ids: int32 `[H_kv, K]` ascending, padded with -1; counts: int32 `[H_kv]`. All on the CPU. Returns a Partial of batch 1.
    """
    heads, dim = queries.shape
    out, lse = np.empty((heads, dim), np.float32), np.empty(heads, np.float32)
    bits, kind, scales = row_bits(table)
    words, kind = as_words(bits, kind, dim)
    blocks, size = table.blocks[0].numpy(), table.block_size
    factors = np.float32(scaling), np.float32(softcap)
    ordered, own, counts = queries.float().contiguous().numpy(), ids.contiguous().numpy(), counts.contiguous()
    _attend_selected(ordered, words, kind, scales, blocks, size, own, counts.numpy(), *factors, out, lse)
    return Partial(torch.from_numpy(out).view(1, heads, 1, dim), torch.from_numpy(lse).view(1, heads, 1))


@njit(cache=True, parallel=PARALLEL, nogil=True)
def _attend_selected(queries, rows, kind, scales, blocks, size, ids, counts, scaling, softcap, out, lse):
    kv_heads, dim = ids.shape[0], queries.shape[1]
    group = queries.shape[0] // kv_heads
    first = first_pieces(counts, PIECE)
    outs, lses = np.empty((first[kv_heads], group, dim), np.float32), np.empty((first[kv_heads], group), np.float32)
    for task in prange(first[kv_heads]):
        h = np.searchsorted(first, task, "right") - 1
        start = (task - first[h]) * PIECE
        own = ids[h, start : min(start + PIECE, counts[h])]
        places, scale_places = places_of(blocks, size, kv_heads, h, own, dim, kind)
        of = slice(h * group, (h + 1) * group)
        attend_piece(queries[of], rows, kind, places, scales, scale_places, scaling, softcap, outs[task], lses[task])
    for h in range(kv_heads):  # less work than waking the threads again
        own, of = slice(first[h], first[h + 1]), slice(h * group, (h + 1) * group)
        merge_pieces(outs[own], lses[own], out[of], lse[of])


@njit(cache=True, nogil=True, fastmath=_FAST)
def attend_piece(queries, rows, kind, places, scales, scale_places, scaling, softcap, out, lse):
    """Queries `[G, D]` of one KV head over the rows `[2, D]` that begin at the words `places` of `rows`; writes out `[G, D]`
    and lse `[G]`.

    Rows in eight bits have the scales of key and value at `scale_places` of `scales` and behind it; see `numeric.row_place`."""
    (group, dim), n = queries.shape, places.shape[0]
    if n == 0:
        out[:], lse[:] = np.float32(0.0), np.float32(-np.inf)
        return
    width = dim // numbers_per_word(kind)
    logits = np.zeros((-(-group // QUERIES) * QUERIES, n), np.float32)
    ordered = in_word_order(queries, kind)
    score_keys(rows, kind, places, scales, scale_places, ordered, _AHEAD, 2 * width, logits[:group], 0)
    for g in range(group):
        peak = np.float32(-np.inf)
        for i in range(n):
            logit = logits[g, i] * scaling
            if softcap > 0:
                logit = softcap * np.tanh(logit / softcap)
            logits[g, i] = logit
            peak = max(peak, logit)
        total = np.float32(0.0)
        for i in range(n):
            weight = np.float32(np.exp(logits[g, i] - peak))
            logits[g, i] = weight
            total += weight
        lse[g] = peak + np.log(total)
        inverse = np.float32(1.0) / total
        for i in range(n):
            logits[g, i] *= inverse
    sums, row = np.zeros((logits.shape[0], dim), np.float32), np.empty(dim, np.float32)
    for i in range(n):
        load_row(rows, np.uint64(places[i] + width), kind, row)
        scale = scales[scale_places[i] + 1] if kind == E4M3 else np.float32(1.0)
        for g in range(0, logits.shape[0], QUERIES):
            weights = logits[g, i] * scale, logits[g + 1, i] * scale, logits[g + 2, i] * scale, logits[g + 3, i] * scale
            add_row(row, weights, g, sums)
    from_word_order(sums, kind, out)


@njit(cache=True, nogil=True, fastmath=_FAST)
def merge_pieces(outs, lses, out, lse):
    """Attention over the union of pieces: outs `[P, G, D]`, lses `[P, G]` -> out `[G, D]`, lse `[G]`."""
    out[:] = np.float32(0.0)
    for g in range(out.shape[0]):
        peak = np.float32(-np.inf)
        for p in range(lses.shape[0]):
            peak = max(peak, lses[p, g])
        lse[g] = peak
        if peak == -np.inf:
            continue
        total = np.float32(0.0)
        for p in range(lses.shape[0]):
            total += np.float32(np.exp(lses[p, g] - peak))
        lse[g] = peak + np.log(total)
        for p in range(lses.shape[0]):
            weight = np.float32(np.exp(lses[p, g] - peak)) / total
            for d in range(out.shape[1]):
                out[g, d] += weight * outs[p, g, d]

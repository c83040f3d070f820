"""Attention of the CPU to selected rows in host memory, in place (CTkvr section 3.2): only the query and the result are copied
between host and device.

By numba: 16-bit rows, fp32 sums, all cores. It releases the interpreter's lock.
Bytes per KV head: K rows of 2 D numbers, read once for all query heads of the group.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import njit, prange
from torch import Tensor

from kvrecall.attend.cpu import PIECE, attend_piece, merge_pieces
from kvrecall.core.numba import PARALLEL, as_words, first_pieces, numba_threads, places_of, row_bits
from kvrecall.core.structs import HostTable, Partial


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
    _attend(ordered, words, kind, scales, blocks, size, own, counts.numpy(), *factors, out, lse)
    return Partial(torch.from_numpy(out).view(1, heads, 1, dim), torch.from_numpy(lse).view(1, heads, 1))


@njit(cache=True, parallel=PARALLEL, nogil=True)
def _attend(queries, rows, kind, scales, blocks, size, ids, counts, scaling, softcap, out, lse):
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

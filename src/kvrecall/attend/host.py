"""Attention of the CPU to selected rows in host memory, in place (CTkvr section 3.2): only the query and the result are copied
between host and device.

By numba: 16-bit rows, fp32 sums, all cores. It releases the interpreter's lock, so it runs beside a GPU's work.
Bytes per KV head: K rows of 2 D numbers, read once for all query heads of the group.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import njit, prange
from torch import Tensor

from kvrecall.attend.cpu import attend_head
from kvrecall.core.numeric import row_bits, row_place
from kvrecall.core.structs import HostTable, Partial


def attend_selected(
    queries: Tensor, table: HostTable, ids: Tensor, counts: Tensor, scaling: float, softcap: float = 0.0
) -> list[Partial]:
    """Attention of one query per head over the rows of `ids`.

    queries: `[H_q, D]`, any float dtype and device. table: addresses of the sequence's rows, for the CPU.
    ids: int32 `[H_kv, K]` ascending, padded with -1; counts: int32 `[H_kv]`. Returns Partials of batch 1, to be merged.
    """
    device, (heads, dim) = queries.device, queries.shape
    near = queries.cpu().float().contiguous().numpy()
    ids, counts = ids.cpu().contiguous(), counts.cpu().contiguous()
    # A head's rows are split among the cores, so that few heads use all of them; the pieces are merged like other parts.
    pieces = max(1, torch.get_num_threads() // table.rows.shape[1])
    outs, lses = np.empty((pieces, heads, dim), np.float32), np.empty((pieces, heads), np.float32)
    bits, kind, scales = row_bits(table)
    blocks, size = table.blocks[0].numpy(), table.block_size
    factors = np.float32(scaling), np.float32(softcap)
    _attend(near, bits, kind, scales, blocks, size, ids.numpy(), counts.numpy(), *factors, outs, lses)
    parts = zip(torch.from_numpy(outs).to(device), torch.from_numpy(lses).to(device), strict=True)
    return [Partial(out.view(1, heads, 1, dim), lse.view(1, heads, 1)) for out, lse in parts]


@njit(cache=True, parallel=True, nogil=True)
def _attend(queries, rows, kind, scales, blocks, size, ids, counts, scaling, softcap, out, lse):
    kv_heads, pieces, dim = ids.shape[0], out.shape[0], queries.shape[1]
    group = queries.shape[0] // kv_heads
    for task in prange(kv_heads * pieces):
        piece = task % pieces
        h = task // pieces
        own = ids[h, counts[h] * piece // pieces : counts[h] * (piece + 1) // pieces]
        places, scale_places = np.empty(own.shape[0], np.int64), np.empty(own.shape[0], np.int64)
        for i in range(own.shape[0]):
            places[i], scale_places[i] = row_place(blocks, size, kv_heads, h, own[i], dim, kind)
        of = slice(h * group, (h + 1) * group)
        attend_head(queries[of], rows, kind, places, scales, scale_places, scaling, softcap, out[piece, of], lse[piece, of])

"""Attention to selected rows where they lie in host memory, by the CPU (CTkvr section 3.2): nothing is gathered, and only the
query and the result cross between host and device.

Compiled with numba: 16-bit rows in, fp32 sums, all cores, the interpreter's lock released, so it runs beside a GPU's work.
Bytes per KV head: K rows of 2 D numbers, read once for all query heads of the group.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import njit, prange
from torch import Tensor

from kvrecall.attend.cpu import attend_head
from kvrecall.core.numeric import as_bits
from kvrecall.core.structs import Partial


def attend_selected(
    queries: Tensor, segments: list[Tensor], ids: Tensor, counts: Tensor, scaling: float, softcap: float = 0.0
) -> list[Partial]:
    """Attention of one query per head over the rows of `ids`.

    queries: `[H_q, D]`, any float dtype and device. segments: the zone's rows in order, `[H_kv, n, 2, D]` each, on the CPU.
    ids: int32 `[H_kv, K]` ascending, padded with -1; counts: int32 `[H_kv]`. Returns Partials of batch 1, to be merged.
    """
    device, (heads, dim) = queries.device, queries.shape
    near = queries.cpu().float().contiguous().numpy()
    ids, counts = ids.cpu().contiguous(), counts.cpu().contiguous()
    parts, start = [], 0
    for segment in segments:
        # A segment is split among the cores even where there are few heads; the pieces are merged like any other parts.
        pieces = max(1, torch.get_num_threads() // segment.shape[0])
        outs, lses = np.empty((pieces, heads, dim), np.float32), np.empty((pieces, heads), np.float32)
        bits, kind = as_bits(segment)
        _attend(near, bits, kind, start, ids.numpy(), counts.numpy(), np.float32(scaling), np.float32(softcap), outs, lses)
        for piece in range(pieces):
            out, lse = torch.from_numpy(outs[piece]).view(1, heads, 1, dim), torch.from_numpy(lses[piece]).view(1, heads, 1)
            parts.append(Partial(out, lse))
        start += segment.shape[1]
    return [Partial(part.out.to(device), part.lse.to(device)) for part in parts]


@njit(cache=True, parallel=True, nogil=True)
def _attend(queries, rows, kind, start, ids, counts, scaling, softcap, out, lse):
    kv_heads, held = rows.shape[0], rows.shape[1]
    pieces = out.shape[0]
    group = queries.shape[0] // kv_heads
    for task in prange(kv_heads * pieces):
        piece = task % pieces
        h = task // pieces
        own = ids[h, : counts[h]]
        lo, hi = np.searchsorted(own, start), np.searchsorted(own, start + held)
        places = own[lo + (hi - lo) * piece // pieces : lo + (hi - lo) * (piece + 1) // pieces] - start
        of = slice(h * group, (h + 1) * group)
        attend_head(queries[of], rows[h], kind, places, scaling, softcap, out[piece, of], lse[piece, of])

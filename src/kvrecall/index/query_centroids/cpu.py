"""CTkvr's host side, by numba: deduplication of recalled lists, exact scores of rows where they lie, and the best of them.

Bytes per search and KV head: the recalled keys, R * D numbers, once for all query heads of a group; nothing is copied. Threads
share the recalled keys of all heads equally. What follows the scores are four passes: as torch functions it would be some
forty small parallel regions, each of which wakes every thread.
"""

# numba passes the typing context of an intrinsic itself; a type checker cannot know this.
# pyright: reportCallIssue=false

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numba import get_num_threads, njit, prange
from torch import Tensor

from kvrecall.core.numeric import BFLOAT16, E4M3, bits_to_float, load_row, prefetch, row_bits, row_place
from kvrecall.core.structs import HostTable
from kvrecall.select.cpu import top_k_of

_AHEAD = 8
_LINE = 64
"""Bytes that one prefetch brings."""
_QUERIES = 4
"""Query heads whose sums are in registers while a row is read."""
_TASKS_PER_THREAD = 4
MODES = {"max": 0, "max_softmax": 1, "mean_softmax": 2}
"""Numbers of the ways in which a group shares a ranking, see `select.gqa`."""
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

    table: addresses of the sequence's rows, for the CPU. Entries after a head's count are -inf.
    """
    heads, group, dim = queries.shape
    bits, kind, scales = row_bits(table)
    near = queries.new_zeros(heads, -(-group // _QUERIES) * _QUERIES, dim)
    near[:, :group] = queries
    step = 2 if kind == BFLOAT16 and dim % 2 == 0 else 1
    if step == 2:
        bits = bits.view(np.uint32)  # two numbers at a time
    even, odd = (near[:, :, first::step].contiguous().numpy() for first in (0, step - 1))
    out, tasks = np.empty((heads, group, ids.shape[1]), np.float32), _TASKS_PER_THREAD * get_num_threads()
    blocks, own = table.blocks[0].numpy(), ids.contiguous().numpy()
    _score(even, odd, dim, step, bits, kind, scales, blocks, table.block_size, own, counts.numpy(), tasks, out)
    return torch.from_numpy(out)


class Softmax(NamedTuple):
    """A softmax over each head's scores times scaling, in float64.

    peaks `[H_kv, G]`: the largest logit, -inf if there is none. powers `[H_kv, G, R]`: exponentials of the logits less
    this one. sums `[H_kv, G]`: of the powers.
    """

    peaks: Tensor
    powers: Tensor
    sums: Tensor


def softmax_of(scores: Tensor, counts: Tensor, scaling: float) -> Softmax:
    """The softmax over the first counts[h] scores `[H_kv, G, R]` times scaling."""
    peaks, sums, powers = np.full(scores.shape[:2], -np.inf), np.zeros(scores.shape[:2]), np.empty(scores.shape)
    _softmax(scores.numpy(), counts.numpy(), scaling, peaks, powers, sums)
    return Softmax(torch.from_numpy(peaks), torch.from_numpy(powers), torch.from_numpy(sums))


def pick(
    scores: Tensor, ids: Tensor, counts: Tensor, softmax: Softmax, k: int, mode: str, scaling: float, barred: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The k best ids without `barred` (ascending, `[H_kv, m]`): int32 `[H_kv, K]`, ascending, padded with -1, and counts.

    Ranked as `select.gqa.reduce_scores` does, ties to the lower id. mode: one of `MODES`.
    """
    heads, longest = ids.shape
    best, kept = np.full((heads, min(k, longest)), -1, np.int32), np.zeros(heads, np.int32)
    barred_ids = np.empty((heads, 0), np.int32) if barred is None else barred.cpu().int().contiguous().numpy()
    ranks, tasks = np.empty(ids.shape, np.float32), _TASKS_PER_THREAD * get_num_threads()
    own = ids.contiguous().numpy()
    _rank(scores.numpy(), counts.numpy(), *(x.numpy() for x in softmax), scaling, MODES[mode], tasks, ranks)
    _pick(ranks, own, counts.numpy(), barred_ids, best, kept)
    return torch.from_numpy(best[:, : int(kept.max()) if heads else 0]), torch.from_numpy(kept)


def best_listed(scores: Tensor, ids: Tensor, lse: Tensor, list_tokens: int, scaling: float) -> tuple[Tensor, Tensor]:
    """The `list_tokens` ids `[H_kv, R]` (-1: none) of the largest score times scaling minus lse fp32 `[H_kv, G]`, largest over
    the group: ascending int32 `[H_kv, list_tokens]`, padded with -1, and these numbers, fp32, padded with -inf."""
    heads = ids.shape[0]
    listed, ranked = np.full((heads, list_tokens), -1, np.int32), np.full((heads, list_tokens), -np.inf, np.float32)
    _best_listed(scores.numpy(), ids.contiguous().numpy(), lse.contiguous().numpy(), np.float32(scaling), listed, ranked)
    return torch.from_numpy(listed), torch.from_numpy(ranked)


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


@njit(cache=True, parallel=True, nogil=True)
def _score(even, odd, dim, step, rows, kind, scales, blocks, size, ids, counts, tasks, out):
    heads = ids.shape[0]
    before = np.zeros(heads + 1, np.int64)
    for h in range(heads):
        before[h + 1] = before[h] + counts[h]
        out[h, :, counts[h] :] = -np.inf
    for task in prange(tasks):
        first, last = before[heads] * task // tasks, before[heads] * (task + 1) // tasks
        for h in range(heads):
            start, stop = max(first, before[h]) - before[h], min(last, before[h + 1]) - before[h]
            if start < stop:
                _score_head(even[h], odd[h], dim, step, rows, kind, scales, blocks, size, heads, h, ids[h], start, stop, out[h])


@njit(cache=True, nogil=True, fastmath=_FAST)
def _score_head(even, odd, dim, step, rows, kind, scales, blocks, size, heads, h, ids, first, last, out):
    """Scores of ids[first:last]. A word of rows `[n]` holds one number, for which `even` has the queries `[·, D]`, padded to
    whole `_QUERIES`; or with step 2 two numbers, for which `even` and `odd` have every second coordinate."""
    group, width = out.shape[0], dim // step
    base, itemsize = rows.ctypes.data, rows.itemsize
    row = np.empty(width, np.float32)
    for i in range(first, last):
        if i + _AHEAD < last:
            place, _ = row_place(blocks, size, heads, h, ids[i + _AHEAD], dim, kind)
            later = base + place // step * itemsize
            for line in range(0, width * itemsize, _LINE):
                prefetch(later + line)
        place, scale_place = row_place(blocks, size, heads, h, ids[i], dim, kind)
        own = rows[place // step : place // step + width]
        scale = scales[scale_place] if kind == E4M3 else np.float32(1.0)
        if width == dim:
            load_row(own, kind, row)
        for g in range(0, group, _QUERIES):
            s_0, s_1, s_2, s_3 = np.float32(0.0), np.float32(0.0), np.float32(0.0), np.float32(0.0)
            if width != dim:
                for d in range(width):
                    word = own[d]
                    low = bits_to_float(np.uint32(word << np.uint32(16)))
                    high = bits_to_float(np.uint32(word & np.uint32(0xFFFF0000)))
                    s_0 += low * even[g, d] + high * odd[g, d]
                    s_1 += low * even[g + 1, d] + high * odd[g + 1, d]
                    s_2 += low * even[g + 2, d] + high * odd[g + 2, d]
                    s_3 += low * even[g + 3, d] + high * odd[g + 3, d]
            else:
                for d in range(width):
                    s_0 += row[d] * even[g, d]
                    s_1 += row[d] * even[g + 1, d]
                    s_2 += row[d] * even[g + 2, d]
                    s_3 += row[d] * even[g + 3, d]
            out[g, i] = s_0 * scale
            if g + 1 < group:
                out[g + 1, i] = s_1 * scale
            if g + 2 < group:
                out[g + 2, i] = s_2 * scale
            if g + 3 < group:
                out[g + 3, i] = s_3 * scale


@njit(cache=True, parallel=True, nogil=True)
def _softmax(scores, counts, scaling, peaks, powers, sums):
    heads, group = scores.shape[0], scores.shape[1]
    for task in prange(heads * group):
        g = task % group
        h = task // group
        peak, total = -np.inf, 0.0
        for i in range(counts[h]):
            peak = max(peak, np.float64(scores[h, g, i]) * scaling)
        for i in range(counts[h]):
            powers[h, g, i] = np.exp(np.float64(scores[h, g, i]) * scaling - peak)
            total += powers[h, g, i]
        if counts[h]:
            peaks[h, g], sums[h, g] = peak, total


@njit(cache=True, parallel=True, nogil=True)
def _rank(scores, counts, peaks, powers, sums, scaling, mode, tasks, ranks):
    """Ranks `[H_kv, R]` of all keys among those of their head."""
    logs = np.log(sums)
    for task in prange(tasks):
        for h in range(scores.shape[0]):
            for i in range(counts[h] * task // tasks, counts[h] * (task + 1) // tasks):
                best, total = -np.inf, 0.0
                for g in range(scores.shape[1]):
                    if mode == 2:
                        total += powers[h, g, i] / sums[h, g]
                    elif mode == 1:
                        best = max(best, np.float64(scores[h, g, i]) * scaling - peaks[h, g] - logs[h, g])
                    else:
                        best = max(best, np.float64(scores[h, g, i]))
                ranks[h, i] = np.float32(total / scores.shape[1] if mode == 2 else best)


@njit(cache=True, parallel=True, nogil=True)
def _pick(ranks, ids, counts, barred, best, kept):
    for h in prange(ids.shape[0]):
        ranked, own = np.empty(counts[h], np.float32), np.empty(counts[h], np.int32)
        at, b = 0, 0
        for i in range(counts[h]):
            while b < barred.shape[1] and barred[h, b] < ids[h, i]:
                b += 1
            if b < barred.shape[1] and barred[h, b] == ids[h, i]:
                continue
            ranked[at], own[at] = ranks[h, i], ids[h, i]
            at += 1
        kept[h] = top_k_of(ranked[:at], own[:at], best.shape[1], best[h])


@njit(cache=True, parallel=True, nogil=True)
def _best_listed(scores, ids, lse, scaling, listed, ranked):
    heads, group, longest = scores.shape
    for h in prange(heads):
        count = 0
        while count < longest and ids[h, count] >= 0:
            count += 1
        every, places = np.full(count, -np.inf, np.float32), np.empty(listed.shape[1], np.int32)
        for g in range(group):
            for i in range(count):
                every[i] = max(every[i], scores[h, g, i] * scaling - lse[h, g])
        for j in range(top_k_of(every, np.arange(count), listed.shape[1], places)):
            listed[h, j], ranked[h, j] = ids[h, places[j]], every[places[j]]

"""CTkvr's host side, by numba: deduplication of recalled lists, exact scores of rows where they lie, and the best of them.

Bytes per search and KV head: the recalled keys, R * D numbers, once for all query heads of a group; nothing is copied. Threads
share pieces of the recalled keys of all heads. What follows the scores is one pass per head for the selection, and one for the
list of the query: as torch functions it would be some forty small parallel regions, each of which wakes every thread.
"""

# numba passes the typing context of an intrinsic itself; a type checker cannot know this.
# pyright: reportCallIssue=false

from __future__ import annotations

import numpy as np
import torch
from numba import njit, prange
from torch import Tensor

from kvrecall.core.numba import (
    PARALLEL,
    as_words,
    exp_below,
    first_pieces,
    in_word_order,
    numba_threads,
    numbers_per_word,
    places_of,
    row_bits,
    score_keys,
    trailing_zeros,
)
from kvrecall.core.structs import HostTable
from kvrecall.select.cpu import top_k_of

_AHEAD = 8
"""Rows are prefetched this far ahead."""
_PIECE = 128
"""Recalled keys that one task scores."""
MODES = {"max": 0, "max_softmax": 1, "mean_softmax": 2}
"""Numbers of the ways in which a group shares a ranking, see `select.gqa`."""
_FAST = {"reassoc", "contract", "arcp", "nsz"}


@numba_threads()
def top_k_rows(scores: Tensor, k: int) -> Tensor:
    """Ascending positions int32 of the k largest of every row, ties to the lower one."""
    flat = scores.contiguous().flatten(0, -2)
    out = np.empty((flat.shape[0], min(k, flat.shape[1])), np.int32)
    if out.size:
        _top_k_rows(flat.numpy(), out)
    return torch.from_numpy(out).view(*scores.shape[:-1], out.shape[1])


@numba_threads()
def distinct(lists: Tensor, tokens: int, first_always: int, excluded: Tensor | None, cut: bool = True) -> tuple[Tensor, Tensor]:
    """As `rerank.distinct`. cut: R is the largest count; otherwise as many as there can be."""
    heads = lists.shape[0]
    most = min(tokens, lists[0].numel() + tokens - first_always) if heads else 0
    out = np.empty((heads, most), np.int32)
    counts = np.zeros(heads, np.int32)
    none = np.empty((heads, 0), np.int32)
    excluded_ids = none if excluded is None else excluded.contiguous().numpy()
    _distinct(lists.contiguous().numpy(), tokens, first_always, excluded_ids, out, counts)
    return torch.from_numpy(out[:, : max(int(counts.max()), 0)] if cut else out), torch.from_numpy(counts)


@numba_threads()
def score_rows(queries: Tensor, table: HostTable, ids: Tensor, counts: Tensor) -> Tensor:
    """Exact inner products fp32 `[H_kv, G, R]` of queries fp32 `[H_kv, G, D]` with the rows of ascending ids `[H_kv, R]`.

    table: addresses of the sequence's rows, for the CPU. Entries after a head's count are -inf.
    """
    scores, peaks, sums = _scratch(queries, ids)
    _score(queries.contiguous().numpy(), *_rows(table), ids.contiguous().numpy(), counts.numpy(), 1.0, scores, peaks, sums)
    return torch.from_numpy(scores)


@numba_threads()
def rerank(
    queries: Tensor, table: HostTable, ids: Tensor, counts: Tensor, k: int, list_tokens: int, mode: str, scaling: float,
    excluded: Tensor | None,
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:  # fmt: skip
    """(scores, lse, best, listed), see `rerank.Rerank`. Scores the rows of ids as `score_rows`; selects the k best ids without
    `excluded` (ascending int `[H_kv, m]`), ranked as `select.gqa.reduce_scores` does, ties to the lower id; and lists the best
    `list_tokens`. mode: one of `MODES`."""
    heads, longest = ids.shape
    scores, peaks, sums = _scratch(queries, ids)
    best, sizes = np.full((heads, min(k, longest)), -1, np.int32), np.zeros(heads, np.int32)
    listed, ranked = np.full((heads, list_tokens), -1, np.int32), np.full((heads, list_tokens), -np.inf, np.float32)
    lse = np.full(scores.shape[:2], -np.inf, np.float32)
    excluded_ids = np.empty((heads, 0), np.int32) if excluded is None else excluded.cpu().int().contiguous().numpy()
    _rerank(
        queries.contiguous().numpy(), *_rows(table), ids.contiguous().numpy(), counts.numpy(), excluded_ids, MODES[mode],
        scaling, scores, peaks, sums, best, sizes, listed, ranked, lse,
    )  # fmt: skip
    best = best[:, : int(sizes.max()) if heads else 0]
    tensors = [torch.from_numpy(x) for x in (scores, lse, best, sizes, listed, ranked)]
    return tensors[0], tensors[1], (tensors[2], tensors[3]), (tensors[4], tensors[5])


def _scratch(queries: Tensor, ids: Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Memory for scores `[H_kv, G, R]`, and for peaks and sums of each piece's softmax, float64 `[H_kv, P, G]`."""
    (heads, group, _), longest = queries.shape, ids.shape[1]
    pieces = max(1, -(-longest // _PIECE))
    scores = np.empty((heads, group, longest), np.float32)
    return scores, np.full((heads, pieces, group), -np.inf), np.zeros((heads, pieces, group))


def _rows(table: HostTable) -> tuple[np.ndarray, int, np.ndarray, np.ndarray, int]:
    """Words of all rows, their kind, scales, blocks of the sequence, and tokens per block."""
    bits, kind, scales = row_bits(table)
    return *as_words(bits, kind, table.rows.shape[-1]), scales, table.blocks[0].numpy(), table.block_size


@njit(cache=True, parallel=PARALLEL, nogil=True)
def _top_k_rows(scores, out):
    positions = np.arange(scores.shape[1])
    for row in prange(scores.shape[0]):
        top_k_of(scores[row], positions, out.shape[1], out[row])


@njit(cache=True, parallel=PARALLEL, nogil=True)
def _distinct(lists, tokens, first_always, excluded, out, counts):
    for h in prange(lists.shape[0]):
        counts[h] = _distinct_of(lists[h], tokens, first_always, excluded[h], out[h])


@njit(cache=True, nogil=True)
def _distinct_of(lists, tokens, first_always, excluded, out):
    """One head's ids from a set of bits, 64 tokens per word; returns how many there are."""
    one, every = np.uint64(1), np.uint64(0xFFFFFFFFFFFFFFFF)
    wanted = np.zeros(-(-tokens // 64), np.uint64)
    for c in range(lists.shape[0]):
        for i in range(lists.shape[1]):
            token = lists[c, i]
            if token >= 0:
                wanted[token >> 6] |= one << np.uint64(token & 63)
    for word in range(first_always >> 6, wanted.shape[0]):
        below = np.uint64(max(0, first_always - 64 * word))  # the first word may begin before the first token
        above = np.uint64(max(0, 64 * word + 64 - tokens))  # the last one may go on behind the last token
        wanted[word] |= (every << below) & (every >> above)
    for i in range(excluded.shape[0]):
        wanted[excluded[i] >> 6] &= ~(one << np.uint64(excluded[i] & 63))
    at = 0
    for word in range(wanted.shape[0]):
        bits = wanted[word]
        while bits != 0:
            out[at] = 64 * word + np.int64(trailing_zeros(bits))
            at += 1
            bits &= bits - one
    out[at:] = -1
    return at


@njit(cache=True, nogil=True)
def _rerank(
    queries, rows, kind, scales, blocks, size, ids, counts, excluded, mode, scaling, scores, peaks, sums, best, sizes, listed,
    ranked, lse,
):  # fmt: skip
    _score(queries, rows, kind, scales, blocks, size, ids, counts, scaling, scores, peaks, sums)
    _choose(ids, counts, excluded, mode, scaling, scores, peaks, sums, best, sizes, listed, ranked, lse)


@njit(cache=True, parallel=PARALLEL, nogil=True)
def _score(queries, rows, kind, scales, blocks, size, ids, counts, scaling, scores, peaks, sums):
    """Scores, and each piece's largest logit and sum of exponentials of the logits less this one."""
    heads, dim, begin = ids.shape[0], queries.shape[2], first_pieces(counts, _PIECE)
    width = dim // numbers_per_word(kind)
    for task in prange(begin[heads]):
        h = np.searchsorted(begin, task, "right") - 1
        piece = task - begin[h]
        first, last = piece * _PIECE, min((piece + 1) * _PIECE, counts[h])
        places, scale_places = places_of(blocks, size, heads, h, ids[h, first:last], dim, kind)
        ordered = in_word_order(queries[h], kind)
        score_keys(rows, kind, places, scales, scale_places, ordered, _AHEAD, width, scores[h], first)
        if last == counts[h]:
            scores[h, :, last:] = -np.inf
        for g in range(scores.shape[1]):
            peaks[h, piece, g], sums[h, piece, g] = _mass(scores[h, g, first:last], scaling)


@njit(cache=True, nogil=True)
def _mass(scores, scaling):
    """The largest logit, and the sum of exponentials of the logits less this one."""
    logits, peak = np.empty(scores.shape[0]), -np.inf
    for i in range(scores.shape[0]):
        logits[i] = np.float64(scores[i]) * scaling
        peak = max(peak, logits[i])
    for i in range(scores.shape[0]):
        logits[i] = exp_below(logits[i] - peak)
    return peak, _sum(logits)


@njit(cache=True, nogil=True, fastmath=_FAST)
def _sum(numbers):
    total = 0.0
    for i in range(numbers.shape[0]):
        total += numbers[i]
    return total


@njit(cache=True, parallel=PARALLEL, nogil=True)
def _choose(ids, counts, excluded, mode, scaling, scores, peaks, sums, best, sizes, listed, ranked, lse):
    """The selection and the list of every head, one task each."""
    for task in prange(2 * ids.shape[0]):
        h = task // 2
        count = counts[h]
        peak, total = _softmax_of(peaks[h], sums[h])
        if task % 2 == 0:
            ranks = _ranks(scores[h], count, peak, total, scaling, mode)
            sizes[h] = _pick(ranks, ids[h], count, excluded[h], best[h])
            if count:
                lse[h] = _log_sum(peak, total)
        elif listed.shape[1]:
            lse_of_head = _log_sum(peak, total)
            _list(scores[h], ids[h], count, lse_of_head, np.float32(scaling), listed[h], ranked[h])


@njit(cache=True, nogil=True)
def _softmax_of(peaks, sums):
    """(largest logit, sum of exponentials of the logits less this one) of each query head of a group, float64 `[G]`, from those
    of the pieces `[P, G]`."""
    peak, total = np.full(peaks.shape[1], -np.inf), np.zeros(peaks.shape[1])
    for g in range(peaks.shape[1]):
        for piece in range(peaks.shape[0]):
            peak[g] = max(peak[g], peaks[piece, g])
        for piece in range(peaks.shape[0]):
            if sums[piece, g] > 0:
                total[g] += sums[piece, g] * np.exp(peaks[piece, g] - peak[g])
    return peak, total


@njit(cache=True, nogil=True)
def _log_sum(peak, total):
    """lse fp32 `[G]` of what `_softmax_of` returns."""
    return (peak + np.log(total)).astype(np.float32)


@njit(cache=True, nogil=True)
def _ranks(scores, count, peak, total, scaling, mode):
    """Ranks fp32 `[count]` of the keys among those of their head."""
    group = scores.shape[0]
    best, logs = np.full(count, 0.0 if mode == 2 else -np.inf), np.log(total)
    for g in range(group):
        for i in range(count):
            if mode == 2:
                best[i] += np.exp(np.float64(scores[g, i]) * scaling - peak[g]) / total[g]
            elif mode == 1:
                best[i] = max(best[i], np.float64(scores[g, i]) * scaling - peak[g] - logs[g])
            else:
                best[i] = max(best[i], np.float64(scores[g, i]))
    return (best / group if mode == 2 else best).astype(np.float32)


@njit(cache=True, nogil=True)
def _pick(ranks, ids, count, excluded, best):
    """The best ids that are not excluded; returns how many there are."""
    ranked, allowed = np.empty(count, np.float32), np.empty(count, np.int32)
    at, b = 0, 0
    for i in range(count):
        while b < excluded.shape[0] and excluded[b] < ids[i]:
            b += 1
        if b < excluded.shape[0] and excluded[b] == ids[i]:
            continue
        ranked[at], allowed[at] = ranks[i], ids[i]
        at += 1
    return top_k_of(ranked[:at], allowed[:at], best.shape[0], best)


@njit(cache=True, nogil=True)
def _list(scores, ids, count, lse, scaling, listed, ranked):
    """The ids of the largest log softmax, largest over the group, and this number."""
    every, places = np.full(count, -np.inf, np.float32), np.empty(listed.shape[0], np.int32)
    for g in range(scores.shape[0]):
        for i in range(count):
            every[i] = max(every[i], scores[g, i] * scaling - lse[g])
    for j in range(top_k_of(every, np.arange(count), listed.shape[0], places)):
        listed[j], ranked[j] = ids[places[j]], every[places[j]]

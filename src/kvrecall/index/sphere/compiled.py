"""The two-stage search for the CPU, compiled with numba; returns exactly the ids of `reference.py`.

Work is cut into (sequence, KV head, chunk of tokens) so that few heads still fill all cores:
1. tables: per query and block, 256 collision bonuses and 4 x 256 products of coordinate pairs;
2. scan: coarse score of every token by table look-up, and a histogram per chunk (bytes: S per token);
3. threshold: the score at which the wanted number of candidates is reached, and how many equal ones each chunk may take;
4. rerank: candidates in ascending position, 4 look-ups per block (bytes: 5 to 7 S per candidate);
5. final top-k by radix selection on the float bits.
"""

# numba passes the typing context of an intrinsic by itself, which a type checker cannot know.
# pyright: reportCallIssue=false

from __future__ import annotations

import numpy as np
import torch
from numba import njit, prange
from torch import Tensor

from kvrecall.index.sphere.codes import magnitude_levels
from kvrecall.index.sphere.schedule import StageSizes
from kvrecall.numeric import as_bits, load_float, prefetch, sort_key
from kvrecall.structs import Budget, Selection

_CHUNK = 2048
_AHEAD = 16
_MEAN_SOFTMAX, _MAX, _PER_HEAD, _MEAN_Q = 0, 1, 2, 3
_MODES = {"mean_softmax": _MEAN_SOFTMAX, "max": _MAX, "per_head": _PER_HEAD, "mean_q": _MEAN_Q}


def search_batch(
    tables: tuple[Tensor, Tensor, Tensor, Tensor],
    lengths: list[int],
    zero_norms: list[bool],
    sequences: list[int],
    queries: Tensor,
    sizes: list[StageSizes],
    budget: Budget,
    mode: str,
) -> Selection:
    """tables: signs, magnitudes, weights `[B, H_kv, cap, ·]` and counts `[B, H_kv, S, 256]`.

    queries: rotated `[b, H_kv, G', D]`.

    lengths, zero_norms, sizes: one per searched sequence; zero_norms says whether any of its keys has norm zero (else the scan
    need not look at weights).
    """
    signs, magnitudes, weights, counts = tables
    weight_bits, kind = as_bits(weights)
    ids, found = _search(
        signs.numpy(), magnitudes.numpy(), weight_bits, kind, counts.numpy(),
        np.array(lengths, np.int64), np.array(zero_norms), np.array(sequences, np.int64), queries.contiguous().numpy(),
        np.array([s.candidates for s in sizes], np.int64), np.array([s.tier_targets for s in sizes], np.int64),
        magnitude_levels().numpy(), budget.top_k, np.float64(budget.scaling), _MODES[mode],
    )  # fmt: skip
    return Selection(torch.from_numpy(ids[:, :, : max(int(found.max()), 0)]), torch.from_numpy(found))


@njit(cache=True, parallel=True, nogil=True)
def _search(
    signs,
    magnitudes,
    weights,
    kind,
    counts,
    lengths,
    zero_norms,
    sequences,
    queries,
    wanted,
    targets,
    levels,
    top_k,
    scaling,
    mode,
):
    b_n, heads, group, dim = queries.shape
    blocks = dim // 8
    sets = group if mode == _PER_HEAD else 1
    longest = lengths.max()
    chunks = (longest + _CHUNK - 1) // _CHUNK
    most = wanted.max()

    bonus = np.empty((b_n, heads, group, blocks, 256), np.uint8)
    pairs = np.empty((b_n, heads, group, blocks, 4, 256), np.float32)
    for task in prange(b_n * heads * group * blocks):
        s = task % blocks
        g = task // blocks % group
        h = task // (blocks * group) % heads
        b = task // (blocks * group * heads)
        block = queries[b, h, g, 8 * s : 8 * s + 8]
        _bonus_table(block, counts[sequences[b], h, s], targets[b], bonus[b, h, g, s])
        _pair_tables(block, levels, pairs[b, h, g, s])

    coarse = np.empty((b_n, heads, sets, longest), np.uint8)
    histogram = np.zeros((b_n, heads, sets, chunks, 256), np.int32)
    for task in prange(b_n * heads * chunks):
        c = task % chunks
        h = task // chunks % heads
        b = task // (chunks * heads)
        start, end = c * _CHUNK, min((c + 1) * _CHUNK, lengths[b])
        if start < end:
            row = sequences[b]
            _scan(signs[row, h], bonus[b, h], start, end, coarse[b, h], histogram[b, h, :, c])
            if zero_norms[b]:
                _bar_zero_norms(weights[row, h], start, end, coarse[b, h], histogram[b, h, :, c])

    # Per chunk: how many tokens pass the threshold, how many ties it may take, where its candidates start.
    threshold = np.empty((b_n, heads, sets), np.int64)
    quota = np.empty((b_n, heads, sets, chunks), np.int64)
    offset = np.empty((b_n, heads, sets, chunks), np.int64)
    candidates = np.empty((b_n, heads, sets, most), np.int32)
    scores = np.empty((b_n, heads, group if mode == _MEAN_SOFTMAX else sets, most), np.float32)
    for b in range(b_n):
        for h in range(heads):
            for j in range(sets):
                threshold[b, h, j] = _threshold(histogram[b, h, j], wanted[b], quota[b, h, j], offset[b, h, j])

    for task in prange(b_n * heads * sets * chunks):
        c = task % chunks
        j = task // chunks % sets
        h = task // (chunks * sets) % heads
        b = task // (chunks * sets * heads)
        start, end = c * _CHUNK, min((c + 1) * _CHUNK, lengths[b])
        if start < end:
            row = sequences[b]
            first = offset[b, h, j, c]
            taken = _compact(coarse[b, h, j], start, end, threshold[b, h, j], quota[b, h, j, c], candidates[b, h, j], first)
            chosen = candidates[b, h, j, first:taken]
            if mode == _MEAN_SOFTMAX:
                for g in range(group):
                    _rerank(
                        signs[row, h],
                        magnitudes[row, h],
                        weights[row, h],
                        kind,
                        pairs[b, h, g],
                        chosen,
                        scores[b, h, g, first:taken],
                        False,
                    )
            elif mode == _PER_HEAD:
                _rerank(
                    signs[row, h],
                    magnitudes[row, h],
                    weights[row, h],
                    kind,
                    pairs[b, h, j],
                    chosen,
                    scores[b, h, j, first:taken],
                    False,
                )
            else:
                for g in range(group):
                    _rerank(
                        signs[row, h],
                        magnitudes[row, h],
                        weights[row, h],
                        kind,
                        pairs[b, h, g],
                        chosen,
                        scores[b, h, 0, first:taken],
                        g > 0,
                    )

    best = np.empty((b_n, heads, sets, top_k), np.int32)
    kept = np.empty((b_n, heads, sets), np.int64)
    for task in prange(b_n * heads * sets):
        j = task % sets
        h = task // sets % heads
        b = task // (sets * heads)
        n = wanted[b]
        if mode == _MEAN_SOFTMAX:
            _mean_softmax(scores[b, h, :, :n], scaling)
        row_scores = scores[b, h, j, :n]
        for i in range(n):
            if coarse[b, h, j, candidates[b, h, j, i]] == 0:  # a key of zero norm ranks behind everything
                row_scores[i] = -np.inf
        kept[b, h, j] = _top_k(row_scores, candidates[b, h, j], top_k, best[b, h, j])

    ids = np.full((b_n, heads, sets * top_k), -1, np.int32)
    found = np.empty((b_n, heads), np.int32)
    for task in prange(b_n * heads):
        h = task % heads
        b = task // heads
        found[b, h] = _union(best[b, h], kept[b, h], ids[b, h])
    return ids, found


@njit(cache=True)
def _bonus_table(block, counts, targets, out):
    """Collision bonus of the 256 sign patterns. Sorting is a merge of two sorted halves per added coordinate."""
    proxy = np.empty(256, np.float32)
    order = np.empty(256, np.int32)
    scratch = np.empty(256, np.int32)
    proxy[0], proxy[1] = -block[0], block[0]
    if block[0] > 0:
        order[0], order[1] = 1, 0
    else:
        order[0], order[1] = 0, 1
    size = 2
    for j in range(1, 8):
        value = block[j]
        for i in range(size):
            proxy[size + i] = proxy[i] + value
            proxy[i] = proxy[i] - value
        # order[:size] sorts both halves: adding a constant keeps the order up to ties, which are mended at the end.
        low, high, out_at = 0, 0, 0
        while low < size and high < size:
            if proxy[order[low]] >= proxy[size + order[high]]:
                scratch[out_at] = order[low]
                low += 1
            else:
                scratch[out_at] = size + order[high]
                high += 1
            out_at += 1
        while low < size:
            scratch[out_at] = order[low]
            low += 1
            out_at += 1
        while high < size:
            scratch[out_at] = size + order[high]
            high += 1
            out_at += 1
        size *= 2
        for i in range(size):
            order[i] = scratch[i]
    for i in range(1, 256):  # insertion sort by (proxy descending, id ascending); nearly sorted already
        item = order[i]
        at = i
        while at > 0 and (proxy[order[at - 1]] < proxy[item] or (proxy[order[at - 1]] == proxy[item] and order[at - 1] > item)):
            order[at] = order[at - 1]
            at -= 1
        order[at] = item
    better = 0
    for i in range(256):
        tiers = 0
        for t in range(targets.shape[0]):
            if better < targets[t]:
                tiers += 1
        out[order[i]] = tiers
        better += counts[order[i]]


@njit(cache=True)
def _pair_tables(block, levels, out):
    """out[p, code]: v0 q0 + v1 q1 for pair p; code = 6 bits of magnitudes | 2 sign bits << 6."""
    for p in range(4):
        q0, q1 = block[2 * p], block[2 * p + 1]
        for code in range(256):
            v0 = levels[code & 7]
            v1 = levels[(code >> 3) & 7]
            if not code & 64:
                v0 = -v0
            if not code & 128:
                v1 = -v1
            a = np.float32(v0 * q0)
            b = np.float32(v1 * q1)
            out[p, code] = np.float32(a + b)


@njit(cache=True)
def _scan(signs, bonus, start, end, coarse, histogram):
    """coarse[j, i] = 1 + bonus sum (the group's largest unless it has one set per head)."""
    group, blocks = bonus.shape[0], bonus.shape[1]
    sets = coarse.shape[0]
    for i in range(start, end):
        best = 0
        for g in range(group):
            total = 1
            for s in range(blocks):
                total += bonus[g, s, signs[i, s]]
            if sets == 1:
                best = max(best, total)
            else:
                coarse[g, i] = total
                histogram[g, total] += 1
        if sets == 1:
            coarse[0, i] = best
            histogram[0, best] += 1


@njit(cache=True)
def _bar_zero_norms(weights, start, end, coarse, histogram):
    """Moves keys of zero norm to coarse score 0, behind everything."""
    for i in range(start, end):
        zero = True
        for s in range(weights.shape[1]):
            if weights[i, s] != 0:
                zero = False
                break
        if zero:
            for j in range(coarse.shape[0]):
                histogram[j, coarse[j, i]] -= 1
                histogram[j, 0] += 1
                coarse[j, i] = 0


@njit(cache=True)
def _threshold(histogram, wanted, quota, offset):
    """Smallest score of which some tokens are taken; lower positions take the ties first."""
    chunks = histogram.shape[0]
    above = 0
    score = 256
    while score > 0:
        here = 0
        for c in range(chunks):
            here += histogram[c, score - 1]
        score -= 1
        if above + here >= wanted:
            break
        above += here
    left = wanted - above
    at = 0
    for c in range(chunks):
        offset[c] = at
        quota[c] = min(left, histogram[c, score])
        left -= quota[c]
        at += quota[c]
        for higher in range(score + 1, 256):
            at += histogram[c, higher]
    return score


@njit(cache=True)
def _compact(coarse, start, end, threshold, quota, out, at):
    for i in range(start, end):
        score = coarse[i]
        if score > threshold:
            out[at] = i
            at += 1
        elif score == threshold and quota > 0:
            out[at] = i
            at += 1
            quota -= 1
    return at


@njit(cache=True)
def _rerank(signs, magnitudes, weights, kind, pairs, chosen, out, keep_larger):
    """Estimated inner products (Eq. 24) of the chosen tokens; the sums are ordered as in the reference.

    Candidates lie scattered, so each costs cache misses; those of the token `_AHEAD` places on are asked for early.
    """
    blocks = pairs.shape[0]
    sign_base, magnitude_base, weight_base = signs.ctypes.data, magnitudes.ctypes.data, weights.ctypes.data
    for c in range(chosen.shape[0]):
        if c + _AHEAD < chosen.shape[0]:
            later = np.int64(chosen[c + _AHEAD])
            prefetch(sign_base + later * signs.strides[0])
            prefetch(magnitude_base + later * magnitudes.strides[0])
            prefetch(magnitude_base + (later + 1) * magnitudes.strides[0] - 1)
            prefetch(weight_base + later * weights.strides[0])
        i = chosen[c]
        total = np.float32(0.0)
        for s in range(blocks):
            word = (
                np.uint32(magnitudes[i, 3 * s])
                | (np.uint32(magnitudes[i, 3 * s + 1]) << np.uint32(8))
                | (np.uint32(magnitudes[i, 3 * s + 2]) << np.uint32(16))
            )
            sign = np.uint32(signs[i, s])
            dot = pairs[s, 0, (word & 63) | ((sign & 3) << 6)]
            dot = np.float32(dot + pairs[s, 1, ((word >> 6) & 63) | (((sign >> 2) & 3) << 6)])
            dot = np.float32(dot + pairs[s, 2, ((word >> 12) & 63) | (((sign >> 4) & 3) << 6)])
            dot = np.float32(dot + pairs[s, 3, ((word >> 18) & 63) | (((sign >> 6) & 3) << 6)])
            term = np.float32(load_float(weights[i, s], kind) * dot)
            total = np.float32(total + term) if s > 0 else term
        out[c] = max(out[c], total) if keep_larger else total


@njit(cache=True)
def _mean_softmax(scores, scaling):
    """Replaces row 0 by the mean over rows of softmax(scaling * row), summed in float64."""
    group, n = scores.shape
    mean = np.zeros(n, np.float64)
    weights = np.empty(n, np.float64)
    for g in range(group):
        peak = -np.inf
        for i in range(n):
            peak = max(peak, np.float64(scores[g, i]) * scaling)
        total = 0.0
        for i in range(n):
            weights[i] = np.exp(np.float64(scores[g, i]) * scaling - peak)
            total += weights[i]
        for i in range(n):
            mean[i] += weights[i] / total
    for i in range(n):
        scores[0, i] = np.float32(mean[i] / group)


@njit(cache=True)
def _top_k(scores, ids, k, out):
    """ids of the k largest scores in ascending position, ties to the lower one; returns how many there are."""
    n = scores.shape[0]
    if n <= k:
        for i in range(n):
            out[i] = ids[i]
        return n
    keys = np.empty(n, np.uint32)
    for i in range(n):
        keys[i] = sort_key(scores[i])
    prefix, mask, left = np.uint32(0), np.uint32(0), k
    counts = np.empty(2048, np.int64)
    for shift, width in ((21, 11), (10, 11), (0, 10)):
        counts[:] = 0
        field = np.uint32((1 << width) - 1)
        for i in range(n):
            if (keys[i] & mask) == prefix:
                counts[(keys[i] >> np.uint32(shift)) & field] += 1
        digit = (1 << width) - 1
        while counts[digit] < left:
            left -= counts[digit]
            digit -= 1
        prefix = np.uint32(prefix | (np.uint32(digit) << np.uint32(shift)))
        mask = np.uint32(mask | (field << np.uint32(shift)))
    at = 0
    for i in range(n):
        if keys[i] > prefix:
            out[at] = ids[i]
            at += 1
        elif keys[i] == prefix and left > 0:
            out[at] = ids[i]
            at += 1
            left -= 1
    return k


@njit(cache=True)
def _union(best, kept, out):
    """Merge of ascending id lists without repeats."""
    sets = best.shape[0]
    at = np.zeros(sets, np.int64)
    count = 0
    while True:
        lowest = np.int64(2**62)
        for j in range(sets):
            if at[j] < kept[j]:
                lowest = min(lowest, np.int64(best[j, at[j]]))
        if lowest == 2**62:
            return count
        out[count] = lowest
        count += 1
        for j in range(sets):
            if at[j] < kept[j] and best[j, at[j]] == lowest:
                at[j] += 1

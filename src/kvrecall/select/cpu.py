"""The selection rules for searches by numba: exactly those of `gqa.py` and `topk.py`."""

# numba passes the typing context of an intrinsic by itself, which a type checker cannot know.
# pyright: reportCallIssue=false

from __future__ import annotations

import numpy as np
from numba import njit

from kvrecall.core.numba import sort_key

_RANGES = 2048
"""Ranges of scores that are counted at once."""


@njit(cache=True)
def softmax_ranks(scores, scaling, mean):
    """Replaces row 0 by the mean over rows of softmax(scaling * row), or by the largest logarithm of it, in float64."""
    group, n = scores.shape
    ranks = np.full(n, 0.0 if mean else -np.inf)
    weights = np.empty(n, np.float64)
    for g in range(group):
        peak = -np.inf
        for i in range(n):
            peak = max(peak, np.float64(scores[g, i]) * scaling)
        total = 0.0
        for i in range(n):
            weights[i] = np.exp(np.float64(scores[g, i]) * scaling - peak)
            total += weights[i]
        norm = np.log(total)
        for i in range(n):
            if mean:
                ranks[i] += weights[i] / total
            else:
                ranks[i] = max(ranks[i], np.float64(scores[g, i]) * scaling - peak - norm)
    for i in range(n):
        scores[0, i] = np.float32(ranks[i] / group if mean else ranks[i])


@njit(cache=True)
def top_k_of(scores, ids, k, out):
    """ids of the k largest scores in ascending position, ties to the lower one; returns how many there are."""
    n = scores.shape[0]
    if n <= k:
        for i in range(n):
            out[i] = ids[i]
        return n
    keys, left = _highest_range(scores, k)
    least, left = _kth_largest(keys, left)
    at = 0
    for i in range(n):
        key = sort_key(scores[i])
        if key > least:
            out[at] = ids[i]
            at += 1
        elif key == least and left > 0:
            out[at] = ids[i]
            at += 1
            left -= 1
    return k


@njit(cache=True)
def _highest_range(scores, k):
    """Keys uint32 of the scores among which the k-th largest is, and how many of these are among the k largest.

    The range from the smallest score to the largest is divided into equal ones, so most scores have a range to themselves, and
    counting one waits for no other."""
    n = scores.shape[0]
    low, high = np.float64(scores[0]), np.float64(scores[0])
    for i in range(n):
        low, high = min(low, np.float64(scores[i])), max(high, np.float64(scores[i]))
    ranges, left, last = np.zeros(n, np.int32), k, 0
    if low < high and high - low < np.inf:
        counts, factor = np.zeros(_RANGES, np.int32), (_RANGES - 1) / (high - low)
        for i in range(n):
            ranges[i] = np.int32((np.float64(scores[i]) - low) * factor)
            counts[ranges[i]] += 1
        last = _RANGES - 1
        while counts[last] < left:
            left -= counts[last]
            last -= 1
    keys, count = np.empty(n, np.uint32), 0
    for i in range(n):
        if ranges[i] == last:
            keys[count] = sort_key(scores[i])
            count += 1
    return keys[:count], left


@njit(cache=True)
def _kth_largest(keys, k):
    """The k-th largest key, and how many that are equal to it are among the k largest."""
    prefix, mask, left = np.uint32(0), np.uint32(0), k
    counts = np.empty(256, np.int64)
    for shift in (24, 16, 8, 0):
        counts[:] = 0
        for i in range(keys.shape[0]):
            if (keys[i] & mask) == prefix:
                counts[(keys[i] >> np.uint32(shift)) & np.uint32(255)] += 1
        digit = 255
        while counts[digit] < left:
            left -= counts[digit]
            digit -= 1
        prefix = np.uint32(prefix | (np.uint32(digit) << np.uint32(shift)))
        mask = np.uint32(mask | (np.uint32(255) << np.uint32(shift)))
    return prefix, left


@njit(cache=True)
def union(best, counts, out):
    """Merge of ascending id lists without repeats."""
    sets = best.shape[0]
    at = np.zeros(sets, np.int64)
    count = 0
    while True:
        lowest = np.int64(2**62)
        for j in range(sets):
            if at[j] < counts[j]:
                lowest = min(lowest, np.int64(best[j, at[j]]))
        if lowest == 2**62:
            return count
        out[count] = lowest
        count += 1
        for j in range(sets):
            if at[j] < counts[j] and best[j, at[j]] == lowest:
                at[j] += 1

"""The selection rules for searches by numba: exactly those of `gqa.py` and `topk.py`."""

# numba passes the typing context of an intrinsic by itself, which a type checker cannot know.
# pyright: reportCallIssue=false

from __future__ import annotations

import numpy as np
from numba import njit

from kvrecall.core.numeric import sort_key


@njit(cache=True)
def mean_softmax(scores, scaling):
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
def max_softmax(scores, scaling):
    """Replaces row 0 by the largest over rows of log softmax(scaling * row), in float64."""
    group, n = scores.shape
    best = np.full(n, -np.inf, np.float64)
    for g in range(group):
        peak = -np.inf
        for i in range(n):
            peak = max(peak, np.float64(scores[g, i]) * scaling)
        total = 0.0
        for i in range(n):
            total += np.exp(np.float64(scores[g, i]) * scaling - peak)
        norm = np.log(total)
        for i in range(n):
            best[i] = max(best[i], np.float64(scores[g, i]) * scaling - peak - norm)
    for i in range(n):
        scores[0, i] = np.float32(best[i])


@njit(cache=True)
def top_k_of(scores, ids, k, out):
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
def union(best, kept, out):
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

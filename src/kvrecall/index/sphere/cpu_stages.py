"""The stages of the search by numba, each over one chunk of one KV head; `cpu.py` runs them in parallel."""

# numba passes the typing context of an intrinsic itself; a type checker cannot know this.
# pyright: reportCallIssue=false

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from kvrecall.core.numba import FLOAT32, SMALL, load_float, prefetch
from kvrecall.core.small_floats import UNIT
from kvrecall.index.sphere.cos_sin import SPAN

_AHEAD = 16
"""A cache line is prefetched this many candidates ahead."""


class Layout(NamedTuple):
    """Blocks of codes: bytes from one to the next, tokens of each, and the byte at which each part of a block begins."""

    stride: int
    size: int
    starts: np.ndarray


@njit(cache=True, inline="always")
def part(codes, layout, block, number, h, width):
    """Part `number` of one KV head's codes, `[size, width]`, in a block of `codes` `[n]`, numbers of one, two or four bytes."""
    rows = layout.size * width
    first = (block * layout.stride + layout.starts[number]) // codes.itemsize + h * rows
    return codes[first : first + rows].reshape(layout.size, width)


@njit(cache=True)
def bonus_table(block, counts, targets, out):
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
        # order[:size] sorts both halves: adding a constant keeps the order except for ties, which are fixed at the end.
        low, high = 0, 0
        for at in range(2 * size):
            if high == size or (low < size and proxy[order[low]] >= proxy[size + order[high]]):
                scratch[at] = order[low]
                low += 1
            else:
                scratch[at] = size + order[high]
                high += 1
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
def pair_tables(block, levels, out):
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
def scan(signs, first, bonus, start, end, coarse, histogram, scale, norms, added):
    """coarse[j, i] = 1 + (bonus sum + offset) >> shift, cut off at 0 and `top` (`reference.Scores`); the group's largest if it
    has one set.

    signs: of the tokens from `first` on; tokens start .. end - 1 are scored. norms: uint8 codes `[n, 1]` of factors of the
    sums, in units of 2^-UNIT; may be empty. added: int64 `[G, R]`, added to the sums of each SPAN tokens.
    """
    group, blocks = bonus.shape[0], bonus.shape[1]
    sets = coarse.shape[0]
    weighed = norms.size > 0
    factor, power = 1, 0
    for i in range(start, end):
        best = 0
        if weighed:
            factor, power = 16 + np.int64(norms[i - first, 0] & 15), np.int64(norms[i - first, 0] >> 4)
        for g in range(group):
            total = 0
            for s in range(blocks):
                total += bonus[g, s, signs[i - first, s]]
            if weighed:
                total = ((total * factor) << power) >> UNIT
            total += added[g, i // SPAN] + scale.offset
            score = 1 + min(max(total >> scale.shift, 0), scale.top)
            if sets == 1:
                best = max(best, score)
            else:
                coarse[g, i] = score
                histogram[g, score] += 1
        if sets == 1:
            coarse[0, i] = best
            histogram[0, best] += 1


@njit(cache=True)
def bar(i, coarse, histogram):
    """Gives a token coarse score 0."""
    for j in range(coarse.shape[0]):
        histogram[j, coarse[j, i]] -= 1
        histogram[j, 0] += 1
        coarse[j, i] = 0


@njit(cache=True)
def bar_zero_norms(weights, first, start, end, coarse, histogram):
    """Gives keys of zero norm the lowest coarse score, 0. weights: `[n, bytes]`, all 0 for such keys."""
    for i in range(start, end):
        zero = True
        for s in range(weights.shape[1]):
            if weights[i - first, s] != 0:
                zero = False
                break
        if zero:
            bar(i, coarse, histogram)


@njit(cache=True)
def exclude_ids(excluded, start, end, coarse, histogram):
    """Gives the tokens of an ascending id list coarse score 0, so that they do not become candidates."""
    for i in excluded[np.searchsorted(excluded, start) : np.searchsorted(excluded, end)]:
        bar(i, coarse, histogram)


@njit(cache=True)
def drop_ids(excluded, ids, scores):
    """Removes the ids of one ascending list from another, with their columns of scores; returns how many are left."""
    left, at = 0, 0
    for i in range(ids.shape[0]):
        while at < excluded.shape[0] and excluded[at] < ids[i]:
            at += 1
        if at == excluded.shape[0] or excluded[at] != ids[i]:
            ids[left] = ids[i]
            for g in range(scores.shape[0]):
                scores[g, left] = scores[g, i]
            left += 1
    return left


@njit(cache=True)
def threshold(histogram, wanted, quota, offset):
    """Smallest score of the candidates; among ties lower positions come first."""
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
def compact(coarse, start, end, threshold, quota, out, at):
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
def rerank(signs, magnitudes, weights, first, kind, pairs, chosen, out, keep_larger, added):
    """Estimated inner products (Eq. 24) of the chosen tokens, plus `added` fp32 `[R]` of their spans of tokens.

    Codes begin with token `first` and cover all chosen tokens. Sums are in the reference's order. Candidates are scattered, so
    each costs cache misses; the codes of the candidate `_AHEAD` places ahead are prefetched.
    """
    blocks = pairs.shape[0]
    sign_base, magnitude_base, weight_base = signs.ctypes.data, magnitudes.ctypes.data, weights.ctypes.data
    for c in range(chosen.shape[0]):
        if c + _AHEAD < chosen.shape[0]:
            later = np.int64(chosen[c + _AHEAD]) - first
            prefetch(sign_base + later * signs.strides[0])
            prefetch(magnitude_base + later * magnitudes.strides[0])
            prefetch(magnitude_base + (later + 1) * magnitudes.strides[0] - 1)
            prefetch(weight_base + later * weights.strides[0])
        i = chosen[c] - first
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
        total = np.float32(total + added[chosen[c] // SPAN])
        out[c] = max(out[c], total) if keep_larger else total


@njit(cache=True)
def rerank_block(codes, halves, words, kind, layout, block, h, base, pairs, chosen, out, keep_larger, added):
    """`rerank` of tokens of one block, which begins with token `base`. halves, words: the codes in numbers of two and of four
    bytes, in which weights of these sizes lie."""
    blocks = pairs.shape[0]
    signs, magnitudes = part(codes, layout, block, 0, h, blocks), part(codes, layout, block, 1, h, 3 * blocks)
    if kind == SMALL:
        weights = part(codes, layout, block, 2, h, blocks)
        rerank(signs, magnitudes, weights, base, kind, pairs, chosen, out, keep_larger, added)
    elif kind == FLOAT32:
        singles = part(words, layout, block, 2, h, blocks)
        rerank(signs, magnitudes, singles, base, kind, pairs, chosen, out, keep_larger, added)
    else:
        shorts = part(halves, layout, block, 2, h, blocks)
        rerank(signs, magnitudes, shorts, base, kind, pairs, chosen, out, keep_larger, added)

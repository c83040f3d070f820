"""Rows of host memory for numba, read word by word: a word holds one number, or two bfloat16 numbers.

Words of two numbers give a row's even coordinates first, then the odd ones (word order), because a vector of words is split
into two vectors by one instruction each. Products of a row and a query are the same in any order that both have, so queries are
brought into word order before, and sums over rows out of it afterwards.

Words are read by their number, without views of single rows: a view that is passed to another function counts references to the
memory of all rows, by atomic additions to one counter of all threads. Numbers are unsigned, because a negative one would count
from the end, and loops that ask for that are not vectorised.

Only modules with numba code may import it, because it imports numba.
"""

# numba passes the typing context of an intrinsic itself; a type checker cannot know this.
# pyright: reportCallIssue=false

from __future__ import annotations

import numpy as np
from numba import njit

from kvrecall.core.numeric import BFLOAT16, E4M3, bits_to_float, load_e4m3, load_float, prefetch, row_place

PAIRS = 5
"""Kind of words that hold two bfloat16 numbers; see `numeric.as_bits` for the other kinds."""
QUERIES = 4
"""Queries whose sums are in registers while a row is read."""
_LINE = 64
"""Bytes that one prefetch brings."""
_FAST = {"reassoc", "contract", "arcp", "nsz"}  # not nnan/ninf: -inf marks an empty part


def as_words(bits: np.ndarray, kind: int, dim: int) -> tuple[np.ndarray, int]:
    """Numbers of a kind as words, and the kind of the words. bits: unsigned integers `[..., n]`, contiguous, rows of `dim`."""
    return (bits.view(np.uint32), PAIRS) if kind == BFLOAT16 and dim % 2 == 0 else (bits, kind)


@njit(inline="always")
def numbers_per_word(kind):
    """1 or 2."""
    return 2 if kind == PAIRS else 1


@njit(cache=True, nogil=True)
def load_row(words, first, kind, row):
    """Fills row fp32 `[D]`, in word order, with one key or value, whose first word has the number `first`, uint64."""
    if kind == PAIRS:  # each kind has a loop of its own, which is vectorised then
        width = np.uint64(row.shape[0] // 2)
        for i in range(width):
            word = words[first + i]
            row[i] = bits_to_float(np.uint32(word << np.uint32(16)))
            row[width + i] = bits_to_float(np.uint32(word & np.uint32(0xFFFF0000)))
    elif kind == E4M3:
        for i in range(np.uint64(row.shape[0])):
            row[i] = load_e4m3(words[first + i])
    else:
        for i in range(np.uint64(row.shape[0])):
            row[i] = load_float(words[first + i], kind)


@njit(cache=True, nogil=True)
def in_word_order(queries, kind):
    """Queries fp32 `[G, D]` in word order, padded with 0 to whole `QUERIES`."""
    group, dim = queries.shape
    ordered = np.zeros((-(-group // QUERIES) * QUERIES, dim), np.float32)
    step = numbers_per_word(kind)
    width = dim // step
    for g in range(group):
        for i in range(width):
            for part in range(step):
                ordered[g, part * width + i] = queries[g, step * i + part]
    return ordered


@njit(cache=True, nogil=True)
def from_word_order(sums, kind, out):
    """Fills out fp32 `[G, D]` from sums of rows `[·, D]` in word order."""
    group, dim = out.shape
    step = numbers_per_word(kind)
    width = dim // step
    for g in range(group):
        for i in range(width):
            for part in range(step):
                out[g, step * i + part] = sums[g, part * width + i]


@njit(cache=True, nogil=True)
def first_pieces(counts, size):
    """Numbers int64 `[H + 1]` of each head's first piece, if the counts `[H]` are divided into pieces of up to `size` rows; the
    last one is the number of pieces. A head without rows has an empty piece.

    Threads share pieces in equal numbers, so no number is given to pieces that do not exist."""
    first = np.zeros(counts.shape[0] + 1, np.int64)
    for h in range(counts.shape[0]):
        first[h + 1] = first[h] + max(1, -(-counts[h] // size))
    return first


@njit(inline="always")
def prefetch_words(address, count):
    """Prefetches `count` bytes."""
    for line in range(0, count, _LINE):
        prefetch(address + line)


@njit(cache=True, nogil=True)
def places_of(blocks, size, heads, h, ids, dim, kind):
    """First words int64 `[n]` of the rows of one KV head, by their ids `[n]`, and places of their scales; as `row_place`."""
    places, scale_places = np.empty(ids.shape[0], np.int64), np.empty(ids.shape[0], np.int64)
    step = numbers_per_word(kind)
    for i in range(ids.shape[0]):
        place, scale_places[i] = row_place(blocks, size, heads, h, ids[i], dim, kind)
        places[i] = place // step
    return places, scale_places


@njit(cache=True, nogil=True, fastmath=_FAST)
def score_keys(words, kind, places, scales, scale_places, queries, ahead, read, out, first):
    """Fills out fp32 `[G, ·]`, from column `first` on, with the inner products of queries `[·, D]` in word order and the keys
    that begin at the words `places`. Keys in eight bits have scales at `scale_places`. `read` words of each row are prefetched,
    `ahead` rows before they are needed."""
    n, group, dim = places.shape[0], out.shape[0], queries.shape[1]
    base, itemsize, width = words.ctypes.data, words.itemsize, np.uint64(dim // numbers_per_word(kind))
    if kind == PAIRS:  # a loop of its own takes two thirds of the time of one loop for all kinds
        for i in range(n):
            if i + ahead < n:
                prefetch_words(base + places[i + ahead] * itemsize, read * itemsize)
            for g in range(0, group, QUERIES):
                found = _products_of_pairs(words, np.uint64(places[i]), width, queries, g)
                _keep(found, np.float32(1.0), out, g, first + i)
        return
    row = np.empty(dim, np.float32)
    for i in range(n):
        if i + ahead < n:
            prefetch_words(base + places[i + ahead] * itemsize, read * itemsize)
        load_row(words, np.uint64(places[i]), kind, row)
        scale = scales[scale_places[i]] if kind == E4M3 else np.float32(1.0)
        for g in range(0, group, QUERIES):
            _keep(_products(row, queries, g), scale, out, g, first + i)


@njit(inline="always")
def _products_of_pairs(words, first, width, queries, g):
    """As `_products`, of a key in `width` words of two numbers from number `first` on, both uint64; without a copy of it."""
    s_0, s_1, s_2, s_3 = np.float32(0.0), np.float32(0.0), np.float32(0.0), np.float32(0.0)
    for i in range(width):
        word = words[first + i]
        even = bits_to_float(np.uint32(word << np.uint32(16)))
        odd = bits_to_float(np.uint32(word & np.uint32(0xFFFF0000)))
        s_0 += even * queries[g, i] + odd * queries[g, width + i]
        s_1 += even * queries[g + 1, i] + odd * queries[g + 1, width + i]
        s_2 += even * queries[g + 2, i] + odd * queries[g + 2, width + i]
        s_3 += even * queries[g + 3, i] + odd * queries[g + 3, width + i]
    return s_0, s_1, s_2, s_3


@njit(inline="always")
def _products(row, queries, g):
    """Inner products of a row with the queries g .. g + QUERIES - 1 of `[·, D]`, all in word order."""
    s_0, s_1, s_2, s_3 = np.float32(0.0), np.float32(0.0), np.float32(0.0), np.float32(0.0)
    for d in range(row.shape[0]):
        s_0 += row[d] * queries[g, d]
        s_1 += row[d] * queries[g + 1, d]
        s_2 += row[d] * queries[g + 2, d]
        s_3 += row[d] * queries[g + 3, d]
    return s_0, s_1, s_2, s_3


@njit(inline="always")
def _keep(found, scale, out, g, column):
    """Stores the products of the queries g .. g + QUERIES - 1, as far as there are so many."""
    out[g, column] = found[0] * scale
    if g + 1 < out.shape[0]:
        out[g + 1, column] = found[1] * scale
    if g + 2 < out.shape[0]:
        out[g + 2, column] = found[2] * scale
    if g + 3 < out.shape[0]:
        out[g + 3, column] = found[3] * scale


@njit(cache=True, nogil=True, fastmath=_FAST)
def add_row(row, weights, g, sums):
    """Adds a row times weights `[QUERIES]` to the sums g .. g + QUERIES - 1 of `[·, D]`."""
    w_0, w_1, w_2, w_3 = weights
    for d in range(row.shape[0]):
        sums[g, d] += w_0 * row[d]
        sums[g + 1, d] += w_1 * row[d]
        sums[g + 2, d] += w_2 * row[d]
        sums[g + 3, d] += w_3 * row[d]

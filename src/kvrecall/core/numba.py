"""What all code for numba shares: parallel loops and their threads, numbers of 16 and 8 bits, rows in host memory.

Only modules with numba code may import it, because it imports numba.

Rows in host memory are read word by word: a word holds one number, or two bfloat16 numbers. Words of two numbers give a row's
even coordinates first, then the odd ones (word order), because a vector of words is split into two vectors by one instruction
each. Products of a row and a query are the same in any order that both have, so queries are brought into word order before, and
sums over rows out of it afterwards.

Words are read by their number, without views of single rows: a view that is passed to another function counts references to the
memory of all rows, by atomic additions to one counter of all threads. Numbers are unsigned, because a negative one would count
from the end, and loops that ask for that are not vectorised.
"""

# numba passes the typing context of an intrinsic itself; a type checker cannot know this.
# pyright: reportCallIssue=false

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, wraps
from threading import RLock
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import get_num_threads, njit, set_num_threads, types
from numba.extending import intrinsic
from numba.np.ufunc import threading_layer
from torch import Tensor

from kvrecall.core.fp8 import flat
from kvrecall.core.small_floats import OFFSET, SHIFT
from kvrecall.core.structs import HostTable

PARALLEL: Any = {"prange": True} | dict.fromkeys(
    ("comprehension", "fusion", "inplace_binop", "numpy", "reduction", "setitem", "stencil"), False
)
"""For `njit(parallel=...)`: loops over `prange` are parallel and nothing else. Otherwise, arrays that are filled or added up
become parallel loops of their own, which take a fifth of the time of a compilation. Inside `prange`, arithmetic with whole
arrays belongs into a function of its own, since numba refuses it there."""
_one_at_a_time = RLock()
FLOAT32, BFLOAT16, FLOAT16, SMALL, E4M3 = 0, 1, 2, 3, 4
_KINDS = {
    torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16, torch.uint8: SMALL, torch.float8_e4m3fn: E4M3,
}  # fmt: skip
_UNSIGNED = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}


def parallel_njit(**options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """`njit` for a function with loops over `prange` that only Python calls, in `loops_turn`; options: more of `njit`."""

    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        loops = njit(cache=True, parallel=PARALLEL, nogil=True, **options)(function)

        @wraps(function)
        def call(*args: Any) -> Any:
            with loops_turn():
                return loops(*args)

        return call

    return compiled


def loops_turn() -> AbstractContextManager[Any]:
    """A context for parallel loops. numba's threading layer "workqueue" ends the process if two threads are in such loops, so
    there one waits for the other."""
    return nullcontext() if several_threads_may_loop() else _one_at_a_time


@cache
def several_threads_may_loop() -> bool:
    """Whether numba's threading layer lets several threads run parallel loops at the same time."""
    get_num_threads()  # chooses the layer
    return threading_layer() != "workqueue"


def as_bits(tensor: Tensor) -> tuple[np.ndarray, int]:
    """A CPU float tensor (uint8: small floats) as a view of unsigned integers, and its kind for `load_float`."""
    return tensor.detach().view(_UNSIGNED[tensor.itemsize]).numpy(), _KINDS[tensor.dtype]


def row_bits(table: HostTable) -> tuple[np.ndarray, int, np.ndarray]:
    """The rows of a layer for numba: all numbers of all blocks as unsigned integers `[n]`, their kind for `load_float`, and the
    scales fp32 `[n]` of rows in eight bits, which lie between the blocks in the same memory; else `[0]`."""
    every = flat(table.rows)
    bits, kind = as_bits(every)
    return bits, kind, bits.view(np.float32) if kind == E4M3 else np.empty(0, np.float32)


@njit(cache=True, nogil=True)
def row_place(blocks, size, heads, h, token, dim, kind):
    """(place of a token's row among the numbers, place of its first scale) in what `row_bits` returns. blocks: the
    sequence's."""
    number = np.int64(np.uint32(token) // np.uint32(size))  # a signed division takes several times as long
    block, row = np.int64(blocks[number]), (h - number) * size + token
    rows, width = heads * size, 2 * dim
    if kind != E4M3:
        return (block * rows + row) * width, np.int64(0)
    first = block * rows * (width + 8)  # a block's scales, two of four bytes per row, lie behind its numbers
    return first + row * width, (first + rows * width) // 4 + 2 * row


@njit(inline="always")
def bits_to_float(bits):
    """uint32 -> float32 with the same bits."""
    return np.uint32(bits).view(np.float32)


@njit(inline="always")
def float_to_bits(value):
    """float32 -> uint32 with the same bits."""
    return np.float32(value).view(np.uint32)


@intrinsic
def trailing_zeros(typingctx, bits):
    """Number of zero bits below the lowest one bit of a uint64 other than 0."""

    def build(context, builder, signature, args):
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.uint64(types.uint64), build


@intrinsic
def prefetch(typingctx, address):
    """Prefetches the cache line at an integer address; never faults."""

    def build(context, builder, signature, args):
        integer, pointer = ir.IntType(32), ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [pointer, integer, integer, integer])
        name = "llvm.prefetch.p0"
        function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name=name)
        flags = [integer(0), integer(3), integer(1)]  # for reading, keep in all caches, data
        builder.call(function, [builder.inttoptr(args[0], pointer), *flags])
        return context.get_dummy_value()

    return types.void(types.intp), build


@njit(inline="always")
def load_e4m3(bits):
    """Finite e4m3 bits -> float32."""
    wide = np.uint32(bits)
    number = ((wide & np.uint32(0x80)) << np.uint32(24)) | ((wide & np.uint32(0x7F)) << np.uint32(20))
    return bits_to_float(np.uint32(number)) * np.float32(2.0**120)


@njit(inline="always")
def load_float(bits, kind):
    """Finite fp32, bf16, fp16, e4m3 or small-float bits -> float32. fp16 is re-biased by 2^112 and e4m3 by 2^120, exact for
    denormals too."""
    wide = np.uint32(bits)
    if kind == SMALL:
        return bits_to_float(np.uint32((wide + np.uint32(OFFSET)) << np.uint32(SHIFT))) if wide else np.float32(0.0)
    if kind == FLOAT32:
        return bits_to_float(wide)
    if kind == BFLOAT16:
        return bits_to_float(np.uint32(wide << np.uint32(16)))
    if kind == E4M3:
        return load_e4m3(bits)
    sign = np.uint32((wide & np.uint32(0x8000)) << np.uint32(16))
    magnitude = np.uint32((wide & np.uint32(0x7FFF)) << np.uint32(13))
    scaled = bits_to_float(magnitude) * np.float32(2.0**112)
    return bits_to_float(np.uint32(float_to_bits(scaled) | sign))


_LOG2_E, _LN2_HIGH, _LN2_LOW = 1.4426950408889634, 6.93147180369123816490e-01, 1.90821492927058770002e-10
_WHOLE = 1.5 * 2.0**52
"""Added to a float64 below 2^51, it leaves the nearest whole number in the lowest bits."""
_WHOLE_BITS = int(np.float64(_WHOLE).view(np.int64))


@njit(inline="always")
def exp_below(x):
    """e^x of a float64 x <= 0 within 4e-16 of itself, and e^-708 below -708. Loops over it are vectorised; loops over numpy's
    `exp` are not.

    e^x = 2^n e^r with whole n and |r| <= ln 2 / 2; e^r by its power series. Not for functions with `fastmath`, which may leave
    out a number that is added and then subtracted."""
    x = max(x, -708.0)
    whole = x * _LOG2_E + _WHOLE
    n = whole - _WHOLE
    r = (x - n * _LN2_HIGH) - n * _LN2_LOW
    series = 1.0 / 479001600.0
    for denominator in (39916800.0, 3628800.0, 362880.0, 40320.0, 5040.0, 720.0, 120.0, 24.0, 6.0, 2.0, 1.0, 1.0):
        series = series * r + 1.0 / denominator
    return series * np.int64((np.float64(whole).view(np.int64) - _WHOLE_BITS + 1023) << 52).view(np.float64)


@njit(inline="always")
def sort_key(value):
    """uint32 whose order is the order of non-NaN floats; -0.0 and 0.0 share a key."""
    bits = float_to_bits(np.float32(value + np.float32(0.0)))
    if bits & np.uint32(0x80000000):
        return np.uint32(~bits)
    return np.uint32(bits | np.uint32(0x80000000))


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
                products = _products_of_pairs(words, np.uint64(places[i]), width, queries, g)
                _keep(products, np.float32(1.0), out, g, first + i)
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
def _keep(products, scale, out, g, column):
    """Stores the products of the queries g .. g + QUERIES - 1, as far as there are so many."""
    out[g, column] = products[0] * scale
    if g + 1 < out.shape[0]:
        out[g + 1, column] = products[1] * scale
    if g + 2 < out.shape[0]:
        out[g + 2, column] = products[2] * scale
    if g + 3 < out.shape[0]:
        out[g + 3, column] = products[3] * scale


@njit(cache=True, nogil=True, fastmath=_FAST)
def add_row(row, weights, g, sums):
    """Adds a row times weights `[QUERIES]` to the sums g .. g + QUERIES - 1 of `[·, D]`."""
    w_0, w_1, w_2, w_3 = weights
    for d in range(row.shape[0]):
        sums[g, d] += w_0 * row[d]
        sums[g + 1, d] += w_1 * row[d]
        sums[g + 2, d] += w_2 * row[d]
        sums[g + 3, d] += w_3 * row[d]


MOST = 16
"""Threads of a short loop. A step of CTkvr at 64K on 32 cores takes 1.7 ms with 16 threads, 2.2 with 8 and 4.0 with 32."""


@contextmanager
def numba_threads() -> Iterator[None]:
    """Within the context, or a function with this decorator, the calling thread's numba loops use at most `MOST` threads, and
    run in `loops_turn`."""
    with loops_turn():
        before = get_num_threads()
        if before <= MOST:
            yield
            return
        set_num_threads(MOST)
        try:
            yield
        finally:
            set_num_threads(before)

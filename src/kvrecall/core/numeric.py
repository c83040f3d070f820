"""Scalar building blocks for numba: reading 16-bit floats, ordering floats.

Only modules with numba code may import it, because it imports numba.
"""

# numba passes the typing context of an intrinsic itself; a type checker cannot know this.
# pyright: reportCallIssue=false

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, wraps
from threading import RLock
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import get_num_threads, njit, types
from numba.extending import intrinsic
from numba.np.ufunc import threading_layer
from torch import Tensor

from kvrecall.core.fp8_rows import flat
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


@intrinsic
def bits_to_float(typingctx, bits):
    """uint32 -> float32 with the same bits."""

    def build(context, builder, signature, args):
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.uint32), build


@intrinsic
def float_to_bits(typingctx, value):
    """float32 -> uint32 with the same bits."""

    def build(context, builder, signature, args):
        return builder.bitcast(args[0], ir.IntType(32))

    return types.uint32(types.float32), build


@intrinsic
def bits_to_double(typingctx, bits):
    """int64 -> float64 with the same bits."""

    def build(context, builder, signature, args):
        return builder.bitcast(args[0], ir.DoubleType())

    return types.float64(types.int64), build


@intrinsic
def double_to_bits(typingctx, value):
    """float64 -> int64 with the same bits."""

    def build(context, builder, signature, args):
        return builder.bitcast(args[0], ir.IntType(64))

    return types.int64(types.float64), build


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
    return series * bits_to_double((double_to_bits(whole) - _WHOLE_BITS + 1023) << 52)


@njit(inline="always")
def sort_key(value):
    """uint32 whose order is the order of non-NaN floats; -0.0 and 0.0 share a key."""
    bits = float_to_bits(np.float32(value + np.float32(0.0)))
    if bits & np.uint32(0x80000000):
        return np.uint32(~bits)
    return np.uint32(bits | np.uint32(0x80000000))

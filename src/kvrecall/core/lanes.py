"""Warp-wide PTX instructions, for kernels with one number per thread.

If a block has as many values as the program has threads, each thread has one value, in order: thread `l` of warp `w` has number
`32 w + l`. PTX instructions of a warp can work on such blocks; Triton has no operations for them.
"""

# Loops over constants and tuples of values are resolved by the compiler.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false

from __future__ import annotations

import triton
import triton.language as tl

ADD = "redux.sync.add.s32 $0, $1, 0xffffffff;"
PAIR = "cvt.rz.relu.f16x2.f32 $0, $2, $1;"
LARGER = "max.f16x2 $0, $1, $2;"
PRODUCT = "mma.sync.aligned.m16n8k128.row.col.s32.b1.b1.s32.and.popc {$0, $1, $2, $3}, {$4, $5}, {$6}, {$7, $8, $9, $10};"
PLANES, PLANE_NAMES = 5, range(5)


def _bits(source: str, count: int, into: list[str]) -> str:
    """Words of 32 bits: bit i of the number of every thread, for i < count."""
    taken = "".join(f"and.b32 t, {source}, {1 << i}; setp.ne.b32 p{i}, t, 0; " for i in range(count))
    voted = "".join(f"vote.sync.ballot.b32 {into[i]}, p{i}, 0xffffffff; " for i in range(count))
    return f".reg .pred p<{count}>; .reg .b32 t; {taken}{voted}"


BITS = "{ " + _bits("$5", PLANES, [f"${i}" for i in PLANE_NAMES]) + "}"


def _equal(count: int) -> str:
    """How many threads have the number that this thread counts, of `count` bits; of six bits, also that number plus 32."""
    outs = count - 4
    matched = "".join(f"xor.b32 b{i}, b{i}, ${outs + 1 + i}; " for i in range(5))
    matched += "".join(f"and.b32 b0, b0, b{i}; " for i in range(1, 5))
    if count == 5:
        counted = "popc.b32 $0, b0; "
    else:
        counted = "and.b32 b1, b0, b5; popc.b32 $1, b1; not.b32 b5, b5; and.b32 b1, b0, b5; popc.b32 $0, b1; "
    votes = _bits(f"${outs}", count, [f"b{i}" for i in range(count)])
    return "{ " + f".reg .b32 b<{count}>; " + votes + matched + counted + "}"


EQUAL, EQUAL_64 = _equal(5), _equal(6)


@triton.constexpr_function
def _asm(name):
    """The instruction of that name, because a kernel may not read globals of this module."""
    return {
        "add": ADD, "pair": PAIR, "larger": LARGER, "product": PRODUCT, "bits": BITS, "equal": EQUAL, "equal_64": EQUAL_64,
    }[name]  # fmt: skip


@triton.constexpr_function
def exchanging(mask):
    """The instruction of `exchanged`."""
    return f"shfl.sync.bfly.b32 $0, $1, {mask}, 31, 0xffffffff;"


@triton.constexpr_function
def sharing(i):
    """The instruction of `of_four`."""
    return f"shfl.sync.idx.b32 $0, $1, {i}, 0x1c1f, 0xffffffff;"


@triton.jit
def exchanged(b_x, MASK: tl.constexpr):
    """int32 of the thread whose number in the warp differs by the bit MASK."""
    return tl.inline_asm_elementwise(exchanging(MASK), "=r,r", [b_x], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def of_four(b_x, i: tl.constexpr):
    """int32 of thread i of every four neighbouring threads."""
    return tl.inline_asm_elementwise(sharing(i), "=r,r", [b_x], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def sum_of_warp(b_x):
    """fp32 sum over the warp, equal in all threads."""
    for i in tl.static_range(5):
        b_x += exchanged(b_x.to(tl.int32, bitcast=True), 16 >> i).to(tl.float32, bitcast=True)
    return b_x


@triton.jit
def count_of_warp(b_x):
    """int32 sum over the warp."""
    return tl.inline_asm_elementwise(_asm("add"), "=r,r", [b_x], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def bits_of_warp(b_x):
    """The lower five bits of int32 numbers: word i, int32, has bit i of thread l's number at bit l."""
    return tl.inline_asm_elementwise(
        _asm("bits"), "=r,=r,=r,=r,=r,r", [b_x], dtype=(tl.int32, tl.int32, tl.int32, tl.int32, tl.int32), is_pure=False,
        pack=1,
    )  # fmt: skip


@triton.jit
def pair(b_low, b_high):
    """Two fp32 as fp16 in the halves of an int32, rounded towards 0, negative ones as 0."""
    return tl.inline_asm_elementwise(_asm("pair"), "=r,f,f", [b_low, b_high], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def larger(b_x, b_y):
    """The larger fp16 in each half."""
    return tl.inline_asm_elementwise(_asm("larger"), "=r,r,r", [b_x, b_y], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def product(b_low, b_high, b_column, b_even, b_odd):
    """Adds the number of common bits of rows and columns: 16 rows and 8 columns of 128 bits per warp (`mma.m16n8k128`).

    Thread 4 g + t has bits 32 t .. 32 t + 31 of rows g (low) and g + 8 (high) and of column g, and gets columns 2 t and 2 t + 1
    of row g, then of row g + 8. even, odd: the initial sums of these columns.
    """
    return tl.inline_asm_elementwise(
        _asm("product"), "=r,=r,=r,=r,r,r,r,r,r,r,r", [b_low, b_high, b_column, b_even[0], b_odd[0], b_even[1], b_odd[1]],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def masks_of(b_lane):
    """Masks for `equal`, which counts the number of each thread, 0..31."""
    return (
        (b_lane & 1) - 1, ((b_lane >> 1) & 1) - 1, ((b_lane >> 2) & 1) - 1, ((b_lane >> 3) & 1) - 1, ((b_lane >> 4) & 1) - 1,
    )  # fmt: skip


@triton.jit
def equal(b_x, b_masks):
    """How many threads of the warp have the number 0..31 that this thread counts."""
    return tl.inline_asm_elementwise(
        _asm("equal"), "=r,r,r,r,r,r,r", [b_x, b_masks[0], b_masks[1], b_masks[2], b_masks[3], b_masks[4]], dtype=tl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def equal_64(b_x, b_masks):
    """As `equal`, for numbers 0..63: how many threads have the number, and how many have it plus 32."""
    return tl.inline_asm_elementwise(
        _asm("equal_64"), "=r,=r,r,r,r,r,r,r", [b_x, b_masks[0], b_masks[1], b_masks[2], b_masks[3], b_masks[4]],
        dtype=(tl.int32, tl.int32), is_pure=False, pack=1,
    )  # fmt: skip

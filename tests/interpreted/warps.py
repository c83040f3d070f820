"""The instructions of a warp (`core/triton.py`) in numpy, so that kernels that use them run in the interpreter.

Written from NVIDIA's PTX manual, not from what a kernel makes of them: where a matrix product has its rows and columns, what a
vote and an exchange give. A block of values has the 32 threads of each warp side by side.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from triton.runtime import interpreter

from kvrecall.core import triton as lanes

Words = NDArray[np.uint32]


def _ballot(bits: NDArray[np.bool_]) -> Words:
    """A word whose bit l is that of thread l, for every thread."""
    words = (bits.astype(np.uint32) << np.arange(32, dtype=np.uint32)).sum(-1, dtype=np.uint32)
    return np.broadcast_to(words[:, None], bits.shape)


def product(low: Words, high: Words, column: Words, *sums: Words) -> list[Words]:
    """m16n8k128, row x column, and, popc: A has words t of rows g and g + 8 in thread 4 g + t, B word t of column g, and C
    columns 2 t, 2 t + 1 of row g, then of row g + 8."""
    warps = low.shape[0]
    a = np.concatenate([low.reshape(warps, 8, 4), high.reshape(warps, 8, 4)], 1)
    b = column.reshape(warps, 8, 4)
    shared = np.bitwise_count(a[:, :, None] & b[:, None]).sum(-1).astype(np.uint32)  # [warps, 16, 8]
    made = [shared[:, rows, odd::2].reshape(warps, 32) for rows in (slice(0, 8), slice(8, 16)) for odd in (0, 1)]
    return [x + c for x, c in zip(made, sums, strict=True)]


def bits(number: Words) -> list[Words]:
    return [_ballot((number >> i) & 1 != 0) for i in range(lanes.PLANES)]


def add(number: Words) -> list[Words]:
    return [np.broadcast_to(number.sum(-1, keepdims=True, dtype=np.uint32), number.shape)]


def exchange(mask: int) -> Callable[[Words], list[Words]]:
    return lambda number: [number[:, np.arange(32) ^ mask]]


def of_four(which: int) -> Callable[[Words], list[Words]]:
    return lambda number: [number[:, np.arange(32) // 4 * 4 + which]]


def _halves(x: Words) -> NDArray[np.float16]:
    return np.ascontiguousarray(x).view(np.float16).reshape(*x.shape, 2)


def larger(x: Words, y: Words) -> list[Words]:
    return [np.maximum(_halves(x), _halves(y)).view(np.uint32)[..., 0]]


def pair(low: Words, high: Words) -> list[Words]:
    both = np.maximum(np.stack([low, high], -1).view(np.float32), 0.0)
    near = np.minimum(both, 65504).astype(np.float16)
    cut = np.where(near.astype(np.float32) > both, np.nextafter(near, np.float16(0)), near)  # towards zero
    return [np.ascontiguousarray(cut).view(np.uint32)[..., 0]]


def equal(count: int) -> Callable[..., list[Words]]:
    def counted(number: Words, *masks: Words) -> list[Words]:
        match = np.full(number.shape, 2**32 - 1, dtype=np.uint32)
        for i, mask in enumerate(masks):
            match = match & (_ballot((number >> i) & 1 != 0) ^ mask)
        if count == 5:
            return [np.bitwise_count(match).astype(np.uint32)]
        upper = _ballot((number >> 5) & 1 != 0)
        return [np.bitwise_count(match & ~upper).astype(np.uint32), np.bitwise_count(match & upper).astype(np.uint32)]

    return counted


WORK: dict[str, Callable[..., list[Words]]] = {
    lanes.PRODUCT: product, lanes.BITS: bits, lanes.ADD: add, lanes.LARGER: larger, lanes.PAIR: pair, lanes.EQUAL: equal(5),
    lanes.EQUAL_64: equal(6), **{str(lanes.exchanging(1 << i)): exchange(1 << i) for i in range(5)},
    **{str(lanes.sharing(i)): of_four(i) for i in range(4)},
}  # fmt: skip


def run(builder: Any, asm: str, constraints: str, values: list[Any], kinds: Any, pure: bool, pack: int) -> Any:
    given = [np.ascontiguousarray(v.data).view(np.uint32).reshape(-1, 32) for v in values]
    made = WORK[asm](*given)
    shape, scalar = values[0].data.shape, interpreter.tl.int32
    handles = [interpreter.TensorHandle(np.ascontiguousarray(x).view(np.int32).reshape(shape), scalar) for x in made]
    return SimpleNamespace(get_result=lambda i: handles[i])


@pytest.fixture
def warps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that use a warp's instructions run, and stage I uses them."""
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_inline_asm", run)
    monkeypatch.setattr("kvrecall.index.sphere.kernels.search.binary_products", lambda _: True)

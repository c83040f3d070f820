"""The interpreter's own reduction, made quicker, gives what it gave."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is only there on Linux")
import triton
import triton.language as tl


@triton.jit
def first_and_sum(a_first, a_sum, b_first, b_sum):
    """The first number that is not zero, and the sum: the one depends on the order of operands, both on all of them."""
    return tl.where(a_first == 0, b_first, a_first), a_sum + b_sum


@triton.jit
def kernel(p_in, p_first, p_sum, ROWS: tl.constexpr, COLUMNS: tl.constexpr, AXIS: tl.constexpr, KEEP: tl.constexpr):
    o_r, o_c = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    b_in = tl.load(p_in + o_r[:, None] * COLUMNS + o_c[None, :])
    b_first, b_sum = tl.reduce((b_in, b_in), AXIS, first_and_sum, keep_dims=KEEP)
    if KEEP:
        o_out = o_c[None, :] if AXIS == 0 else o_r[:, None]
    else:
        o_out = o_c if AXIS == 0 else o_r
    tl.store(p_first + o_out, b_first)
    tl.store(p_sum + o_out, b_sum)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize(("rows", "columns", "axis"), [(8, 4, 0), (8, 4, 1), (1, 16, 1), (16, 1, 0), (2, 1, 1)])
def test_a_reduction_with_a_function_of_its_own(rows: int, columns: int, axis: int, keep: bool) -> None:
    numbers = torch.randint(-3, 4, (rows, columns), generator=torch.Generator().manual_seed(rows), dtype=torch.int32)
    first, total = (torch.full((numbers.shape[1 - axis],), 99, dtype=torch.int32) for _ in range(2))
    kernel[(1,)](numbers, first, total, rows, columns, axis, keep)
    lines = numbers.T.tolist() if axis == 0 else numbers.tolist()
    assert first.tolist() == [next((n for n in line if n), 0) for line in lines]
    assert total.tolist() == [sum(line) for line in lines]


@triton.jit
def whole_kernel(p_in, p_out, N: tl.constexpr):
    first, total = tl.reduce((tl.load(p_in + tl.arange(0, N)), tl.load(p_in + tl.arange(0, N))), None, first_and_sum)
    tl.store(p_out, first)
    tl.store(p_out + 1, total)


def test_a_reduction_over_all() -> None:
    out = torch.zeros(2, dtype=torch.int32)
    whole_kernel[(1,)](torch.tensor([0, 0, 5, 0, -2, 1, 0, 3], dtype=torch.int32), out, 8)
    assert out.tolist() == [5, 7]

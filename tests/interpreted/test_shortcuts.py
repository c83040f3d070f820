"""What the interpreter does quicker gives what it gave."""

from __future__ import annotations

import numpy as np
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


@triton.jit
def chosen_kernel(p_in, p_out, limit, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    o_r, o_c = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    o_in = o_r[:, None] * COLUMNS + o_c[None, :]
    b_in = tl.load(p_in + o_in)
    b_row, b_column = tl.load(p_in + o_r * COLUMNS), tl.load(p_in + o_c)
    b_whole = tl.where(b_in > limit, b_row[:, None], b_column[None, :])  # three shapes
    b_rows = tl.where((o_r % 2 == 0)[:, None], b_in, -1.5)  # a column of conditions, and a number
    b_columns = tl.where((o_c < 2)[None, :], b_row[:, None], 0.0)  # none of the three is as large as the result
    b_scalar = tl.where(limit > 0, b_in, b_in * 2)
    b_cube = tl.where(o_in[:, None, :] % 3 == 0, b_in[:, None, :], b_row[:, None, None])
    tl.store(p_out + o_in, b_whole)
    tl.store(p_out + ROWS * COLUMNS + o_in, b_rows)
    tl.store(p_out + 2 * ROWS * COLUMNS + o_in, b_columns)
    tl.store(p_out + 3 * ROWS * COLUMNS + o_in, b_scalar)
    tl.store(p_out + 4 * ROWS * COLUMNS + o_in, tl.sum(b_cube, 1))
    tl.store(p_out + 5 * ROWS * COLUMNS + o_in[None, :, :], b_cube.reshape([1, ROWS, COLUMNS]))


@pytest.mark.parametrize("limit", [0.5, -0.5])
@pytest.mark.parametrize(("rows", "columns"), [(8, 4), (1, 16), (4, 1), (2, 2)])
def test_choices_and_new_axes(rows: int, columns: int, limit: float) -> None:
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))
    out = torch.full((6, rows, columns), torch.nan)
    chosen_kernel[(1,)](x, out, limit, rows, columns)
    index = torch.arange(rows * columns).view(rows, columns)
    cube = torch.where(index % 3 == 0, x, x[:, :1])
    expected = [
        torch.where(x > limit, x[:, :1], x[:1]),
        torch.where(torch.arange(rows)[:, None] % 2 == 0, x, torch.tensor(-1.5)),
        torch.where(torch.arange(columns) < 2, x[:, :1], torch.tensor(0.0)),
        x if limit > 0 else x * 2, cube, cube,
    ]  # fmt: skip
    assert torch.equal(out, torch.stack(expected))


def test_numbers_that_do_not_fit_a_type_are_an_error() -> None:
    from triton.runtime.interpreter import TensorHandle

    held = TensorHandle(np.zeros(3, dtype=np.int8), tl.int1)
    assert held.attr == {} and held.dtype is tl.int1
    with pytest.raises(ValueError, match="64 bits"):
        TensorHandle(np.zeros(3, dtype=np.int64), tl.int32)


def test_an_axis_too_many_is_an_error() -> None:
    @triton.jit
    def wrong(p_out):
        tl.store(p_out, tl.arange(0, 4)[:, :, None])

    with pytest.raises(Exception, match="too many indices"):
        wrong[(1,)](torch.zeros(4))

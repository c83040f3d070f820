"""Rows in eight bits: what they lose, that they lose it once, and where they lie."""

from __future__ import annotations

import pytest
import torch

from kvrecall.core import fp8
from kvrecall.core.fp8 import as_stored, block_of, quantised, rows_of
from kvrecall.core.numba import row_bits, row_place
from kvrecall.core.structs import HostTable
from tests.blocks import host_table, in_eight_bits
from tests.strategies import DTYPES, gaussian


def spread(dtype: torch.dtype, dim: int = 64) -> torch.Tensor:
    """Rows `[2, 200, 2, D]` of sizes from 1e-3 to 1e3; some numbers are far below others of their row."""
    rows = gaussian(0, 2, 200, 2, dim) * torch.logspace(-3, 3, 200).view(-1, 1, 1)
    return (rows * torch.logspace(0, -7, dim)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_number_loses_a_sixteenth_at_most(dtype: str) -> None:
    rows = spread(DTYPES[dtype])
    back, largest = as_stored(rows), rows.double().abs().amax(-1, keepdim=True)
    lost = (back.double() - rows.double()).abs()
    least = largest * 2**-17 + (2**-25 if dtype == "fp16" else 0)  # half of the smallest number in eight bits, or in fp16
    assert back.dtype == rows.dtype and (lost <= rows.double().abs() / 16 + least).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_has_been_stored_once_stays_as_it_is(dtype: str) -> None:
    """So it makes no difference how often a row comes back from the host and leaves again."""
    back = as_stored(spread(DTYPES[dtype]))
    assert torch.equal(as_stored(back), back)


def test_the_largest_number_of_a_row_becomes_448() -> None:
    found = quantised(torch.tensor([[448.0, 1.0], [-7.0, 3.0], [0.0, 0.0]]))
    assert found.scales.tolist() == [1.0, 2**-6, 2**-100]
    assert found.numbers.float().tolist() == [[448.0, 1.0], [-448.0, 192.0], [0.0, 0.0]]
    rows = gaussian(2, 500, 64)
    found = quantised(rows)
    assert (found.numbers.float().abs().amax(-1) == 448).all() and (found.scales.view(torch.int32) & 0xFF == 0).all()


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_the_largest_number_of_a_row_is_kept(dtype: str) -> None:
    """Keys of some models have a coordinate that is hundreds of times as large as the others."""
    rows = gaussian(3, 500, 64).to(DTYPES[dtype])
    rows[:, 5] += 300.0
    assert torch.equal(as_stored(rows)[:, 5], rows[:, 5])


def test_a_row_that_is_not_finite_stays_so() -> None:
    rows = torch.ones(3, 4)
    rows[0, 1], rows[1, 2] = float("nan"), float("inf")
    assert as_stored(rows).isfinite().all(-1).tolist() == [False, False, True]


@pytest.mark.parametrize("dim", [32, 80, 256])
def test_where_numbers_and_scales_lie(dim: int) -> None:
    """torch's views, and the places that compiled functions of the CPU compute."""
    plain = host_table([gaussian(1, 3, 40, 2, dim)], 16)
    small = in_eight_bits(plain)
    bits, kind, scales = row_bits(small)
    blocks, expected = small.blocks[0].numpy(), quantised(plain.rows)
    views = fp8.scales_of(small.rows)
    assert small.rows.data_ptr() % 16 == 0 and small.rows.stride(0) == fp8.block_nbytes((3, 16, 2, dim))
    for h in range(3):
        for token in (0, 15, 16, 39):
            block = int(blocks[token // 16])
            place, scale = row_place(blocks, 16, 3, h, token, dim, kind)
            numbers = torch.from_numpy(bits[place : place + 2 * dim]).view(torch.float8_e4m3fn).float()
            assert torch.equal(numbers, expected.numbers[block, h, token % 16].flatten().float())
            assert scales[scale : scale + 2].tolist() == expected.scales[block, h, token % 16].tolist()
            assert torch.equal(views[block, h, token % 16], expected.scales[block, h, token % 16])


def test_a_block_is_one_run_of_bytes() -> None:
    rows = gaussian(1, 2, 16, 2, 64).bfloat16()
    block = block_of(quantised(rows))
    assert len(block) == 2 * 16 * 2 * (64 + 4)
    assert torch.equal(rows_of(block, (2, 16, 2, 64), torch.bfloat16).dequantise(), as_stored(rows))


def test_a_table_knows_its_form() -> None:
    plain = HostTable(torch.zeros(1, 1, 16, 2, 64).half(), torch.zeros(1, 1, dtype=torch.int32))
    small = in_eight_bits(plain)
    assert (plain.fp8, plain.dtype, plain.pool.dtype) == (False, torch.float16, torch.float16)
    assert (small.fp8, small.dtype, small.pool.dtype) == (True, torch.float16, torch.uint8)

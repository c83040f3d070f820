"""Rows in eight bits: e4m3 numbers, and a scale for every key and every value.

A row's largest number becomes 448, the largest of e4m3, and is kept: keys of some models have one coordinate that is far above
the others. Any other number loses at most 1/16 of itself, below 2^-14 of the largest more. The scale has 16 significant bits,
so that its products with e4m3 numbers are exact in fp32: all devices compute the same, and a widened row that is stored again
is the same row. A row with NaN or infinity gets the scale NaN.

Readers that compute in fp32 take the products as they are; others round them to the dtype of the model.

A block of rows `[H_kv, block_size, 2, D]` is one run of bytes: all numbers, then all scales `[H_kv, block_size, 2]` in fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from kvrecall.core.errors import ParameterError

SCALE_BYTES = 4
DTYPE = torch.float8_e4m3fn

_PART = 1 / 448
_KEPT_BITS, _HALF_BIT = ~0xFF, 0x80
"""Of an fp32 number, those of a scale, and half of the last of them."""
_LEAST, _INFINITY = 27 << 23, 0x7F800000
"""The bits of the least scale, 2^-100, and of infinity."""


class Fp8Rows(NamedTuple):
    """Rows in eight bits. numbers: e4m3 `[…, D]`; scales: fp32 `[…]`; dtype: of the rows that they were made of."""

    numbers: Tensor
    scales: Tensor
    dtype: torch.dtype

    def dequantise(self) -> Tensor:
        """The rows `[…, D]` in their dtype. Products are fp32, and nothing is as large as the rows in fp32."""
        return self.numbers.to(self.dtype).mul_(self.scales.unsqueeze(-1))

    def both(self, change: Callable[[Tensor], Tensor]) -> Fp8Rows:
        """The rows with the numbers `[…, D]` and the scales `[…]` changed by the same function: a part, a copy."""
        return Fp8Rows(change(self.numbers), change(self.scales), self.dtype)

    @property
    def shape(self) -> torch.Size:
        return self.numbers.shape

    @property
    def device(self) -> torch.device:
        return self.numbers.device

    @property
    def is_cuda(self) -> bool:
        return self.numbers.is_cuda

    @property
    def nbytes(self) -> int:
        return self.numbers.nbytes + self.scales.nbytes


StoredRows = Tensor | Fp8Rows
"""Rows `[H_kv, n, 2, D]` as they lie in memory: in the dtype of the model, or in eight bits."""


def quantised(rows: Tensor) -> Fp8Rows:
    """Rows `[…, D]` in eight bits, on their device."""
    numbers = rows.float()
    largest = numbers.abs().amax(-1)
    bits = (largest * _PART).view(torch.int32) + _HALF_BIT & _KEPT_BITS
    scales = bits.clamp_min(_LEAST).view(torch.float32).where(largest.view(torch.int32) < _INFINITY, torch.nan)
    return Fp8Rows((numbers * scales.reciprocal().unsqueeze(-1)).to(DTYPE), scales, rows.dtype)


def as_stored(rows: Tensor) -> Tensor:
    """Rows `[…, D]` as they are read back."""
    return quantised(rows).dequantise()


def dequantised(rows: StoredRows) -> Tensor:
    """Rows `[H_kv, n, 2, D]` in the dtype of the model."""
    return rows if isinstance(rows, Tensor) else rows.dequantise()


def part_of(rows: StoredRows, start: int, stop: int) -> StoredRows:
    """Tokens start .. stop - 1 of rows `[H_kv, n, 2, D]`, as a view."""
    return rows[:, start:stop] if isinstance(rows, Tensor) else rows.both(lambda x: x[:, start:stop])


def check_host_rows(form: str) -> None:
    """Raises ParameterError for a form of rows in host memory that does not exist."""
    if form not in ("plain", "fp8"):
        raise ParameterError("host_rows", '"plain" or "fp8"', form, '"fp8" halves host memory, at a loss.')


def host_row_bytes(dim: int, dtype: torch.dtype, fp8: bool) -> int:
    """Bytes of a key and a value, for rows of a dtype or in eight bits."""
    return 2 * (dim + SCALE_BYTES) if fp8 else 2 * dim * dtype.itemsize


def block_nbytes(shape: tuple[int, ...]) -> int:
    """Bytes of a block of rows `[H_kv, block_size, 2, D]`."""
    return prod(shape) + SCALE_BYTES * prod(shape[:-1])


def numbers_of(blocks: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The numbers e4m3 `[blocks, H_kv, block_size, 2, D]` of blocks uint8 `[blocks, block_nbytes]`, as a view."""
    return blocks[:, : prod(shape)].unflatten(1, shape).view(DTYPE)


def scales_of(numbers: Tensor) -> Tensor:
    """The scales fp32 `[blocks, H_kv, block_size, 2]` that lie behind the numbers of each block, as a view. numbers: from
    `numbers_of`."""
    blocks, shape = numbers.shape[0], numbers.shape[1:4]
    content = numbers.view(torch.uint8)
    size = prod(numbers.shape[1:])
    behind = content.as_strided((blocks, SCALE_BYTES * prod(shape)), (content.stride(0), 1), content.storage_offset() + size)
    return behind.view(torch.float32).unflatten(1, shape)


def flat(rows: Tensor) -> Tensor:
    """All numbers of blocks of rows, and what lies between them, `[n]`, as a view. rows: contiguous, or from `numbers_of`."""
    return rows.as_strided((rows.shape[0] * rows.stride(0),), (1,))


def block_of(rows: Fp8Rows) -> Tensor:
    """A block uint8 `[n]` on the CPU: all numbers, then all scales, of rows `[H_kv, block_size, 2, D]`."""
    parts = rows.numbers.contiguous().view(torch.uint8), rows.scales.contiguous().view(torch.uint8)
    return torch.cat([part.flatten().cpu() for part in parts])


def rows_of(block: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Fp8Rows:
    """The rows `[H_kv, block_size, 2, D]` of a block uint8 `[n]`, as views."""
    numbers = numbers_of(block.view(1, -1), shape)
    return Fp8Rows(numbers[0], scales_of(numbers)[0], dtype)

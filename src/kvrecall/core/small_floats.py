"""Unsigned eight-bit floats, four bits of exponent and four of fraction: norms and weights of keys with norms around 1.

Code c > 0 is (16 + c % 16) / 16 * 2^(c // 16 - 10), from .001 to 62 in steps of 3 to 6 %; code 0 is 0. A code is the upper bits
of an fp32 number minus a constant, so packing and unpacking are an addition and a shift.
"""

from __future__ import annotations

import torch
from torch import Tensor

SHIFT = 19
"""Bits of an fp32 number that a code lacks."""
OFFSET = (127 - 10) << 4
"""The upper bits of an fp32 number minus the code."""
UNIT = 14
"""A code's value is (16 + c % 16) << (c // 16), in units of 2^-UNIT."""


def pack(values: Tensor) -> Tensor:
    """fp32 >= 0 -> uint8 of the same shape; too small numbers become the least code, too large ones the largest; 0
    stays 0."""
    bits = values.contiguous().view(torch.int32) + (1 << (SHIFT - 1)) >> SHIFT
    return torch.where(values > 0, (bits - OFFSET).clamp(1, 255), 0).to(torch.uint8)


def unpack(codes: Tensor) -> Tensor:
    """uint8 -> fp32 of the same shape."""
    return torch.where(codes > 0, (codes.int() + OFFSET << SHIFT).view(torch.float32), 0.0)


LARGEST = unpack(torch.tensor([255], dtype=torch.uint8, device="cpu")).item()
LEAST = unpack(torch.tensor([1], dtype=torch.uint8, device="cpu")).item()


def scaled_products(products: Tensor, codes: Tensor) -> Tensor:
    """Whole-number products times the values of codes, in units of 2^-UNIT; int64. Code 0 counts as 2^-10."""
    codes = codes.long()
    return products * (16 + codes % 16) << codes // 16

"""Compact sessions: rows in eight bits (e4m3), each key and each value with a scale of its own.

A row's largest number becomes 448, the largest of e4m3, so a row loses at most 1/16 of each number, whatever its size.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

_LARGEST = 448.0


def compact_bytes(shape: tuple[int, ...]) -> int:
    """Bytes of a compact block of rows `[H_kv, block_size, 2, D]`."""
    return prod(shape) + 4 * prod(shape[:-1])


def compact(rows: Tensor) -> Tensor:
    """Rows `[H_kv, block_size, 2, D]` on the CPU -> uint8 `[n]`: all numbers, then all scales in fp32."""
    wide = rows.float()
    scales = wide.abs().amax(-1, keepdim=True) / _LARGEST
    small = (wide / torch.where(scales > 0, scales, 1.0)).clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn)
    return torch.cat([small.view(torch.uint8).flatten(), scales.contiguous().view(torch.uint8).flatten()])


def restored(held: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Rows `[H_kv, block_size, 2, D]` of `compact`."""
    numbers = prod(shape)
    small = held[:numbers].view(torch.float8_e4m3fn).view(shape)
    return (small.float() * held[numbers:].view(torch.float32).view(*shape[:-1], 1)).to(dtype)

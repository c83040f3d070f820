"""The forms of a saved block: plain, as it lies in memory, or, for rows, in eight bits.

In eight bits (e4m3) each key and each value has a scale of its own. A row's largest number becomes 448, the largest of e4m3, so
a row loses at most 1/16 of each number, whatever its size.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from kvrecall.cache.session_files import BlockMemory

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


def block_nbytes(memory: BlockMemory, form: str) -> int:
    """Bytes of each block of a memory as it is written. form: "plain", as it lies in memory, or "fp8"."""
    block = memory.tensor.shape[1:]
    return compact_bytes(tuple(block)) if form == "fp8" else block.numel() * memory.tensor.element_size()


def block_bytes(memory: BlockMemory, block: int, place: int, tokens: int, form: str) -> Tensor:
    """A block as it is written, a tensor of `block_nbytes` on the CPU. place, tokens: as `BlockMemory.cleared`."""
    held = memory.cleared(block, place, tokens)
    return compact(held) if form == "fp8" else held

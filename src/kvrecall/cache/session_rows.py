"""The forms of a saved block: plain, or, for rows, in eight bits (`core.fp8`).

Rows that are in eight bits in memory are saved as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from kvrecall.cache.block_rows import BlockRows
from kvrecall.cache.session_files import BlockMemory
from kvrecall.core import fp8


def form_of(memory: BlockMemory, wanted: str) -> str:
    """The form in which a memory is saved. wanted: for rows that lie in the dtype of the model, "plain" or "fp8"."""
    if not isinstance(memory, BlockRows):
        return "plain"
    return "fp8" if memory.small else wanted


def block_nbytes(memory: BlockMemory, form: str) -> int:
    """Bytes of each block of a memory as it is written. form: "plain" or "fp8"."""
    if isinstance(memory, BlockRows):
        shape, dtype = memory.shape, memory.dtype
        return fp8.block_nbytes(shape) if form == "fp8" else torch.Size(shape).numel() * dtype.itemsize
    return memory.tensor[0].numel() * memory.tensor.element_size()


def block_bytes(memory: BlockMemory, block: int, place: int, tokens: int, form: str) -> Tensor:
    """A block as it is written, a tensor of `block_nbytes` on the CPU. place, tokens: as `BlockMemory.cleared`."""
    held = memory.cleared(block, place, tokens)
    already = isinstance(memory, BlockRows) and memory.small
    return fp8.block_of(fp8.quantised(held)) if form == "fp8" and not already else held


def reader_of(memory: BlockMemory, form: str) -> Callable[[Tensor], Tensor] | None:
    """Makes a block of the memory of bytes that were written in a form; None if the bytes are the block."""
    if not isinstance(memory, BlockRows) or memory.small == (form == "fp8"):
        return None
    read = _widened if form == "fp8" else _narrowed
    return partial(read, shape=memory.shape, dtype=memory.dtype)


def _widened(held: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return fp8.rows_of(held, shape, dtype).wide()


def _narrowed(held: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return fp8.block_of(fp8.quantised(held.view(dtype).view(shape)))

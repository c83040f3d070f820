"""The codes of one layer in blocks on its device, addressed by the block ids of the host's rows.

A block holds these parts in order, each for all KV heads:

    signs u8 [H_kv, tokens, S] · magnitudes u8 [H_kv, tokens, 3 S] · weights [H_kv, tokens, S] · norms u8 [H_kv, tokens, 1]

A part of all blocks is one strided tensor `[blocks, H_kv, tokens, ·]`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from kvrecall.cache.block_rows import BlockBytes
from kvrecall.core.launch import cdiv
from kvrecall.core.structs import lasting_tensors
from kvrecall.index.sphere.codes import BLOCK, MAGNITUDE_BYTES, Codes
from kvrecall.index.table import numbers_in

ALIGNMENT = 64
"""Parts and blocks begin at multiples of this many bytes, sixteen numbers of four bytes, so that wide loads are aligned for
every dtype."""


@dataclass(frozen=True)
class CodeLayout:
    """The layout of a block of `block_size` tokens. norms: whether norms are stored."""

    kv_heads: int
    head_dim: int
    weight_dtype: torch.dtype
    norms: bool
    block_size: int

    @property
    def parts(self) -> list[tuple[int, torch.dtype]]:
        """(numbers per token and KV head, dtype) of each part, in order."""
        blocks = self.head_dim // BLOCK
        coded = [(blocks, torch.uint8), (blocks * MAGNITUDE_BYTES, torch.uint8), (blocks, self.weight_dtype)]
        return [*coded, (1, torch.uint8)] if self.norms else coded

    @property
    def ends(self) -> list[int]:
        """End of each part in a block, in bytes."""
        rows = self.kv_heads * self.block_size
        return list(accumulate(ALIGNMENT * cdiv(rows * width * dtype.itemsize, ALIGNMENT) for width, dtype in self.parts))

    @property
    def starts(self) -> list[int]:
        """Start of each part in a block, in bytes."""
        return [0, *self.ends[:-1]]

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return self.ends[-1]

    def codes(self, blocks: Tensor) -> Codes:
        """Views `[blocks, H_kv, block_size, ·]` of the parts of blocks uint8 `[blocks, block_bytes]`."""
        parts = zip(self.starts, self.parts, strict=True)
        return Codes(*(numbers_in(blocks, at, of, self.kv_heads, self.block_size, width) for at, (width, of) in parts))

    def nbytes(self, tokens: int) -> int:
        """Bytes of the blocks of a sequence of `tokens` tokens."""
        return cdiv(tokens, self.block_size) * self.block_bytes


@dataclass(frozen=True)
class LentPages:
    """The codes of one layer in blocks of foreign memory, uint8 `[blocks, block_bytes]`."""

    layout: CodeLayout
    tensor: Tensor


class CodePages(BlockBytes):
    """The codes of one layer in all blocks of a pool."""

    def __init__(self, layout: CodeLayout, device: torch.device) -> None:
        super().__init__(layout.block_bytes, layout.block_size, device)
        self.layout = layout
        with lasting_tensors():
            self.codes = layout.codes(self.tensor)
        """Views `[blocks, H_kv, block_size, ·]` of all blocks; only blocks with memory may be used."""

    def cleared(self, block: int, place: int, tokens: int) -> Tensor:
        copy = self.tensor[block].to("cpu", copy=True)
        for part in self.layout.codes(copy.unsqueeze(0)).parts:
            part[0][:, tokens - place * self.block_size :] = 0
        return copy

    def pieces(self, blocks: list[int], start: int, stop: int) -> Iterator[tuple[int, Codes]]:
        """The tokens start .. stop - 1 of a sequence with these blocks, block by block: views `[H_kv, n, ·]`, each with the
        number of its first token."""
        size, at = self.block_size, start
        while at < stop:
            place, offset = divmod(at, size)
            end = min(size, offset + stop - at)
            yield at, Codes(*(part[blocks[place], :, offset:end] for part in self.codes.parts))
            at += end - offset

    def gather(self, blocks: Tensor, start: int, stop: int) -> Codes:
        """Copies of the same tokens, contiguous, `[H_kv, n, ·]`; blocks: int32 `[W]` on the device."""
        size = self.block_size
        own, first = blocks[start // size : cdiv(stop, size)].long(), start // size * size

        def copied(part: Tensor) -> Tensor:
            return part[own].transpose(0, 1).flatten(1, 2)[:, start - first : max(start, stop) - first].contiguous()

        return Codes(*(copied(part) for part in self.codes.parts))

"""The rows of all blocks, in device or host memory, and streaming of a sequence's rows to a GPU."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from itertools import groupby, pairwise

import torch
from torch import Tensor

from kvrecall.cache.copies import rotate
from kvrecall.cache.host_memory import Region, touch
from kvrecall.core.errors import ParameterError
from kvrecall.core.launch import cdiv
from kvrecall.core.pieces import PIECE_TOKENS
from kvrecall.core.structs import FAR_BIAS, HostTable, Pool, lasting_tensors
from kvrecall.index.base import LayerShape

STREAMED_TOKENS, PLACES = 8192, 3
"""Tokens per streamed piece, which are those of the largest block, and the number of pieces in flight."""


class RowBlocks:
    """Keys and values of one layer in all blocks. Those of the first ones lie in device memory, those of all others in host
    memory, page-locked for a GPU. So a block's number tells where its rows are, and they never move. Behind the first ones the
    device has pages for the windows of others."""

    def __init__(
        self, blocks: int, shape: LayerShape, block_size: int, given: int | None = None, on_device: int = 0, pages: int = 0
    ) -> None:  # fmt: skip
        """on_device: blocks with rows in device memory. given: blocks with memory at the start, those included; all by default.
        pages: of `device_rows`, at least on_device."""
        on_host, self.on_device, self.block_size, self.dtype = blocks - on_device, on_device, block_size, shape.dtype
        self._gpu = shape.device if shape.device.type == "cuda" else None
        sizes = shape.kv_heads, block_size, 2, shape.head_dim
        self._region = Region((on_host, *sizes), shape.stored_dtype, self._gpu) if on_host else None
        with lasting_tensors():
            plain = torch.uint8 if shape.stored_dtype.itemsize == 1 else shape.stored_dtype  # not all of torch knows e4m3
            own = torch.zeros(max(on_device, pages), *sizes, dtype=plain, device=shape.device)
            self.device_rows = own.view(shape.stored_dtype)
            """`[pages, H_kv, block_size, 2, D]`, in device memory. Finite: a library multiplies rows behind a sequence's end by
            zero."""
            self.block_rows = self.device_rows[:on_device]
            """Those of blocks."""
        self.rows = self.block_rows if self._region is None else self._region.tensor
        """Those in host memory, if there are any."""
        self.given = on_device
        """Blocks with memory."""
        self.borders: set[int] = set()
        """Blocks that begin another piece of memory; no copy may cross them."""
        self.commit(blocks if given is None else given)

    @property
    def pool(self) -> Pool:
        """All rows, for kernels."""
        if not self.on_device:
            return Pool(self.rows)
        if self._region is None:  # no block is behind the last: NEAR may be a multiple of 16, for which kernels are compiled
            return Pool(self.block_rows, cdiv(self.on_device, 16) * 16)
        between = self.rows.data_ptr() - self.block_rows.data_ptr()
        return Pool(self.block_rows, self.on_device, FAR_BIAS + between // self.rows.itemsize - self.block_rows.numel())

    def run(self, first: int, count: int) -> Tensor:
        """Rows `[count, H_kv, block_size, 2, D]` of blocks on one side of each border."""
        rows, start = (self.block_rows, first) if first < self.on_device else (self.rows, first - self.on_device)
        return rows[start : start + count]

    @staticmethod
    def touch(hosts: Iterable[RowBlocks], blocks: int) -> None:
        """Prepares memory for the first `blocks` blocks of some layers: `commit` is faster then (`host_memory.touch`)."""
        for on_device, same in groupby(hosts, lambda host: host.on_device):
            touch([host._region for host in same if host._region is not None], max(0, blocks - on_device))

    def give_back(self) -> None:
        """Gives prepared memory back to the system that no block has."""
        if self._region is not None:
            self._region.give_back()

    def commit(self, blocks: int) -> None:
        """Gives memory to the first `blocks` blocks. Raises ParameterError if a GPU could not read them."""
        if self._region is None:
            return
        blocks = min(blocks, self.on_device + len(self.rows))
        if blocks > self.on_device and self._region.missing(blocks - self.on_device):
            self.borders.add(self.given)
            self._region.commit(blocks - self.on_device)
            self.given = blocks
        if self._gpu is not None and not self._region.pinned:
            remedy = "Raise the limit of locked memory (`ulimit -l unlimited`)."
            raise ParameterError("host memory", "memory that a GPU can read", "a refusal to page-lock it", remedy)

    @staticmethod
    def block_bytes(shape: LayerShape, block_size: int) -> int:
        """Bytes of a block of one layer."""
        return shape.token_bytes * block_size

    @staticmethod
    def of_all(shapes: Iterable[LayerShape], block_size: int) -> int:
        """Bytes of a block in layers of these shapes."""
        return sum(RowBlocks.block_bytes(shape, block_size) for shape in shapes)

    def store(self, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """keys, values `[T, H_kv, D]`; slots int64 `[T]`. On a CPU, whose engines have no rows elsewhere."""
        rows = torch.stack([keys, values], 2).to(self.rows)
        self.rows[slots // self.block_size, :, slots % self.block_size] = rows

    def pieces(self, table: list[int], stop: int) -> Iterator[Tensor]:
        """Copies `[H_kv, n, K|V, D]` of the rows 0 .. stop - 1 of a sequence with these blocks, in `dtype`, a few thousand at a
        time."""
        for rows, tokens in self.block_pieces(table, stop):
            yield rows.transpose(0, 1).flatten(1, 2)[:, :tokens].to(self.dtype)

    def block_pieces(self, table: list[int], stop: int) -> Iterator[tuple[Tensor, int]]:
        """Copies `[n, H_kv, block_size, K|V, D]` of the rows 0 .. stop - 1 in these blocks, a few thousand tokens at a time, as
        they are stored, and how many of their tokens count."""
        size = self.block_size
        step, behind = max(1, PIECE_TOKENS // size), cdiv(stop, size)
        for first in range(0, behind, step):
            blocks = table[first : min(first + step, behind)]
            rows = torch.cat([self.run(block, 1) for block in blocks]) if self.on_device else self.rows[blocks]
            yield rows, min(stop - first * size, len(blocks) * size)

    def table(self, blocks: list[int]) -> HostTable:
        """Addresses of a sequence's rows, on a CPU."""
        return HostTable(self.rows, torch.tensor([blocks], dtype=torch.int32, device="cpu"))


class Stream:
    """Buffers on a GPU for streamed pieces, shared by all layers of a shape."""

    def __init__(self, shape: LayerShape) -> None:
        self._device = shape.device
        with lasting_tensors():
            size = PLACES, STREAMED_TOKENS * shape.kv_heads * 2 * shape.head_dim
            self._places = torch.empty(size, dtype=shape.stored_dtype, device=shape.device)

    @contextmanager
    def pieces(self, host: RowBlocks, table: list[int], stop: int) -> Iterator[Iterator[tuple[Tensor, int]]]:
        """`RowBlocks.block_pieces`, on the device.

        Copying starts when the context is entered. Each piece must be used before the next one is requested.
        """
        if self._device.type != "cuda":
            yield host.block_pieces(table, stop)
            return
        size, most = host.block_size, STREAMED_TOKENS // host.block_size  # blocks of a piece
        places = self._places.view(PLACES, most, *host.rows.shape[1:])
        own = [table[start : min(start + most, cdiv(stop, size))] for start in range(0, cdiv(stop, size), most)]

        def fill(number: int) -> None:
            for at, first, count in runs(own[number], host.borders):
                places[number % PLACES, at : at + count].copy_(host.run(first, count), non_blocking=True)

        def rows_of(number: int) -> tuple[Tensor, int]:
            count = len(own[number])
            return places[number % PLACES, :count], min(stop - number * most * size, count * size)

        with rotate(self._device, len(own), PLACES, fill, rows_of) as pieces:
            yield pieces


def runs(blocks: list[int], borders: Container[int] = ()) -> list[tuple[int, int, int]]:
    """(place of the first, its id, number) of each run of consecutive ids; a new run begins at each border."""
    begins = [i for i, b in enumerate(blocks) if not i or b != blocks[i - 1] + 1 or b in borders]
    return [(a, blocks[a], b - a) for a, b in pairwise([*begins, len(blocks)])]

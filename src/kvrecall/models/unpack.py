"""Dequantised weights, kept as folders that load in a second.

Reading a GGUF file takes 10 to 20 s for the 0.5B model, on every start: Python reads 150,000 vocabulary entries, and every
tensor is dequantised. So the result is kept, in the dtype it was asked for, as an ordinary folder (weights in safetensors,
tokenizer, config) under `models_dir()/unpacked`: 1.3 GB for the 0.5B model in bfloat16.
A manifest (manifest.py) says what was saved; a folder that is not that is made anew from the GGUF file.

All copies together take at most `KVRECALL_UNPACK_LIMIT` bytes, 4 GiB unless it is set; the least recently used goes first.
`KVRECALL_UNPACK=0` turns keeping off; a disk without ample room does, too. A copy can be deleted at any time.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kvrecall.core.counts import byte_count
from kvrecall.models import manifest
from kvrecall.models.store import models_dir, size_of

DTYPES = (torch.bfloat16, torch.float32, torch.float16)
DEFAULT_LIMIT = "4g"
_FORM = 2
"""Counts up when the same file unpacks to something else: copies of an older form are not used."""


def limit_bytes() -> int:
    """Bytes that all copies may take together; 0 where keeping is turned off. Raises `ParameterError`."""
    if os.environ.get("KVRECALL_UNPACK", "1").lower() in {"0", "no", "off", "false"}:
        return 0
    return byte_count(os.environ.get("KVRECALL_UNPACK_LIMIT") or DEFAULT_LIMIT, "KVRECALL_UNPACK_LIMIT")


def copies(stem: str | None = None) -> list[Path]:
    """Kept folders, the least recently used first: of GGUF files of this name without its suffix, or of all."""
    name = re.compile((r"[^.].*" if stem is None else re.escape(stem)) + r"-[0-9a-f]{12}-\w+")
    try:
        found = [path for path in (models_dir() / "unpacked").iterdir() if name.fullmatch(path.name)]
        return sorted(found, key=lambda path: path.stat().st_mtime_ns)
    except OSError:
        return []


def bytes_of(folder: Path) -> int:
    """Bytes of a copy's files."""
    return sum(map(size_of, folder.rglob("*")))


def folder_of(gguf: Path, dtype: torch.dtype) -> Path:
    """Where the unpacked form of this file belongs; another file under the same name gets another folder."""
    status = gguf.stat()
    identity = f"{_FORM}|{gguf.resolve()}|{status.st_size}|{status.st_mtime_ns}"
    key = hashlib.sha256(identity.encode()).hexdigest()[:12]
    return models_dir() / "unpacked" / f"{gguf.stem}-{key}-{str(dtype).removeprefix('torch.')}"


def find_unpacked(gguf: Path, dtype: torch.dtype | None = None) -> Path | None:
    """A verified folder of this file, in any dtype if none is given; None if there is none or keeping is turned off.

    It counts as used now. Raises `ParameterError` for a limit that is no number.
    """
    if not limit_bytes():
        return None
    try:
        wanted = [folder_of(gguf, each) for each in DTYPES if dtype in (None, each)]
    except OSError:
        return None
    found = next((folder for folder in wanted if manifest.is_sealed(folder) and manifest.is_sound(folder)), None)
    if found:
        with contextlib.suppress(OSError):
            os.utime(found)
    return found


def keep_unpacked(gguf: Path, model: Any, tokenizer: Any, on_notice: Callable[[str], None] | None = None) -> Path | None:
    """Saves a freshly dequantised model and its tokenizer; None if that is turned off or does not succeed.

    on_notice: gets a line that says what is kept, what had to go for it, or why nothing is kept. Written beside its place and
    renamed when complete, so an interrupted save is never found. What a killed process left is removed by the next save.
    """
    limit, tell = limit_bytes(), on_notice or (lambda notice: None)
    target = folder_of(gguf, model.dtype)
    need_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    if need_bytes > limit:
        if limit:
            tell(f"The unpacked copy of {gguf.name} is not kept: {_gib(need_bytes)}, KVRECALL_UNPACK_LIMIT is {_gib(limit)}.")
        return None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(target.parent).free < 4 * need_bytes:
            tell(f"The unpacked copy of {gguf.name}, {_gib(need_bytes)}, is not kept: the disk has little room.")
            return None
        gone = _save(target, model, tokenizer, limit)
    except Exception as error:
        # The model is loaded all the same. A full or read-only disk, whose error is OSError or the writer's own, or another
        # process that saves just now, costs time on the next start and nothing else.
        tell(f"The unpacked copy of {gguf.name} is not kept: saving it ended with {type(error).__name__}.")
        return None
    total = sum(map(bytes_of, copies()))
    told = f" {len(gone)} that {'was' if len(gone) == 1 else 'were'} not used for longest had to go." if gone else ""
    tell(
        f"Kept an unpacked copy of {gguf.name}, {_gib(bytes_of(target))}, to load faster next time; all copies take"
        f" {_gib(total)} of at most {_gib(limit)} (`kvrecall models rm --unpacked` deletes them).{told}"
    )
    return target


def _save(target: Path, model: Any, tokenizer: Any, limit: int) -> list[Path]:
    """Saves the copy in its place and returns those that were deleted for it. Raises `OSError` and what the writers raise."""
    from filelock import FileLock

    with FileLock(target.parent / ".lock", timeout=0):
        for left_over in target.parent.glob(".saving-*"):
            # Ours by the lock: only a killed process can have left it.
            shutil.rmtree(left_over, ignore_errors=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".saving-") as scratch:
            staged = Path(scratch) / "model"
            model.save_pretrained(staged)
            tokenizer.save_pretrained(staged)
            manifest.seal(staged)
            gone, others = [], [folder for folder in copies() if folder != target]
            while others and bytes_of(staged) + sum(map(bytes_of, others)) > limit:
                # Who loads from it keeps the files that are open, and dequantises if that is too late.
                shutil.rmtree(others[0])
                gone.append(others.pop(0))
            if target.exists():
                # Moved away whole, for the same reason.
                target.rename(Path(scratch) / "replaced")
            staged.rename(target)
    return gone


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB"

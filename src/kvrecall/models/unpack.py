"""Dequantised weights, kept as a folder that loads in a second.

Reading a GGUF file takes 20 to 40 s for the 0.5B model, on every start: its reader walks through 150,000 vocabulary entries in
Python, three times, and every tensor is dequantised. So the result is kept, in the dtype it was asked for, as an ordinary
folder (weights in safetensors, tokenizer, config) under `models_dir()/unpacked`: 1.3 GB for the 0.5B model in bfloat16.
A manifest (manifest.py) says what was saved; a folder that is not that is made anew from the GGUF file.

`KVRECALL_UNPACK=0` turns it off; a disk without ample room does, too. The folder can be deleted at any time.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from kvrecall.models import manifest
from kvrecall.models.store import models_dir

DTYPES = (torch.bfloat16, torch.float32, torch.float16)


def folder_of(gguf: Path, dtype: torch.dtype) -> Path:
    """Where the unpacked form of this file belongs; another file under the same name gets another folder."""
    status = gguf.stat()
    identity = f"{gguf.resolve()}|{status.st_size}|{status.st_mtime_ns}"
    key = hashlib.sha256(identity.encode()).hexdigest()[:12]
    return models_dir() / "unpacked" / f"{gguf.stem}-{key}-{str(dtype).removeprefix('torch.')}"


def folders_of(gguf: Path) -> list[Path]:
    """The kept folders of this file, complete, whether damaged or not."""
    try:
        return [folder for dtype in DTYPES if manifest.is_sealed(folder := folder_of(gguf, dtype))]
    except OSError:
        return []


def find_unpacked(gguf: Path, dtype: torch.dtype | None = None) -> Path | None:
    """A verified folder of this file, in any dtype if none is given; None if there is none or keeping is turned off."""
    if not _enabled():
        return None
    wanted = [folder for folder in folders_of(gguf) if dtype is None or folder == folder_of(gguf, dtype)]
    return next((folder for folder in wanted if manifest.is_sound(folder)), None)


def keep_unpacked(gguf: Path, model: Any, tokenizer: Any) -> Path | None:
    """Saves a freshly dequantised model and its tokenizer; None if that is turned off or does not succeed.

    Written beside its place and renamed when complete, so an interrupted save is never found. What a killed process left is
    removed by the next save of the same file.
    """
    if not _enabled():
        return None
    target = folder_of(gguf, model.dtype)
    need_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(target.parent).free < 4 * need_bytes:
            return None
        return _save(target, model, tokenizer)
    except Exception:
        # The model is loaded all the same. A full or read-only disk, whose error is OSError or the writer's own, or another
        # process that saves the same file just now, costs time on the next start and nothing else.
        return None


def _save(target: Path, model: Any, tokenizer: Any) -> Path:
    from filelock import FileLock

    prefix = f".saving-{target.name}-"
    with FileLock(target.parent / f".{target.name}.lock", timeout=0):
        for left_over in target.parent.glob(prefix + "*"):
            shutil.rmtree(left_over, ignore_errors=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=prefix) as scratch:
            staged = Path(scratch) / "model"
            model.save_pretrained(staged)
            tokenizer.save_pretrained(staged)
            manifest.seal(staged)
            if target.exists():
                # Moved away whole: whoever loads from it keeps the files that are open.
                target.rename(Path(scratch) / "replaced")
            staged.rename(target)
    return target


def _enabled() -> bool:
    return os.environ.get("KVRECALL_UNPACK", "1").lower() not in {"0", "no", "off", "false"}

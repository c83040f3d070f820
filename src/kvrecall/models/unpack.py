"""Dequantised weights, kept as a folder that loads in a second.

Reading a GGUF file takes 20 to 40 s for the 0.5B model, on every start: its reader walks through 150,000 vocabulary entries in
Python, three times, and every tensor is dequantised. So the result is kept, in the dtype it was asked for, as an ordinary
folder (weights in safetensors, tokenizer, config) under `models_dir()/unpacked`: 1.3 GB for the 0.5B model in bfloat16.

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

from kvrecall.models.store import models_dir

_COMPLETE = "kvrecall-complete"


def folder_of(gguf: Path, dtype: torch.dtype) -> Path:
    """Where the unpacked form of this file belongs; another file under the same name gets another folder."""
    status = gguf.stat()
    identity = f"{gguf.resolve()}|{status.st_size}|{status.st_mtime_ns}"
    key = hashlib.sha256(identity.encode()).hexdigest()[:12]
    return models_dir() / "unpacked" / f"{gguf.stem}-{key}-{str(dtype).removeprefix('torch.')}"


def find_unpacked(gguf: Path, dtype: torch.dtype | None = None) -> Path | None:
    """A complete unpacked folder of this file, in any dtype if none is given; None if there is none or it is turned off."""
    if not _enabled():
        return None
    dtypes = [dtype] if dtype else [torch.bfloat16, torch.float32, torch.float16]
    folders = (folder_of(gguf, d) for d in dtypes)
    return next((folder for folder in folders if (folder / _COMPLETE).is_file()), None)


def keep_unpacked(gguf: Path, model: Any, tokenizer: Any) -> Path | None:
    """Saves a freshly dequantised model and its tokenizer; None if turned off or the disk has no room or no permission.

    Written beside its place and renamed when complete, so an interrupted save is never found.
    """
    if not _enabled():
        return None
    target = folder_of(gguf, model.dtype)
    need_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(target.parent).free < 4 * need_bytes:
            return None
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".saving-") as scratch:
            staged = Path(scratch) / "model"
            model.save_pretrained(staged)
            tokenizer.save_pretrained(staged)
            (staged / _COMPLETE).touch()
            shutil.rmtree(target, ignore_errors=True)
            staged.rename(target)
    except OSError:
        # A full or read-only disk costs time on the next start, nothing else. Another process may also have been first.
        return None
    return target


def _enabled() -> bool:
    return os.environ.get("KVRECALL_UNPACK", "1").lower() not in {"0", "no", "off", "false"}

"""Dequantised weights of GGUF files, kept as folders that load in a second: one per file and dtype.

Reading a GGUF file takes 10 to 20 s for the 0.5B model. So the result is kept as an ordinary folder (weights in safetensors,
tokenizer, config) under `models_dir()/unpacked`. A copy can be deleted at any time.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from glob import escape
from pathlib import Path
from typing import Any

import torch

from kvrecall.models.files import Notice, models_dir

COMPLETE = "kvrecall-complete.json"
"""Written last: name, size and time of change of each file as it was saved."""


def copies(stem: str = "*", sha256: str = "?" * 12, dtype: str = "*") -> list[Path]:
    """Folders of unpacked weights: all, or those of files by this name without suffix, of this hash, in this dtype."""
    return sorted((models_dir() / "unpacked").glob(f"{stem}-{sha256[:12]}-{dtype}"))


def folder_of(gguf: Path, sha256: str, dtype: torch.dtype) -> Path:
    """Where the copy of a file with this hash belongs."""
    return models_dir() / "unpacked" / f"{gguf.stem}-{sha256[:12]}-{str(dtype).removeprefix('torch.')}"


def is_complete(folder: Path) -> bool:
    """Whether the files are those that were saved, and nobody changed them. Bits that a disk lost are not found."""
    try:
        return json.loads((folder / COMPLETE).read_text(encoding="utf-8")) == _stamps(folder)
    except (OSError, ValueError, RecursionError):
        return False


def _stamps(folder: Path) -> dict[str, list[int]]:
    return {p.name: [p.stat().st_size, p.stat().st_mtime_ns] for p in folder.iterdir() if p.name != COMPLETE}


def save(folder: Path, model: Any, tokenizer: Any, on_notice: Notice | None = None) -> None:
    """Saves a dequantised model. on_notice: gets a line that says so, or why not; the model can be used all the same.

    Written beside its place and renamed when complete, so an interrupted save is never found. What a killed process left, and
    copies of other files by that name in that dtype, are deleted.
    """
    from filelock import FileLock

    parent, (stem, _, dtype) = folder.parent, folder.name.rsplit("-", 2)
    notice = f"Kept {folder} to load faster next time (`kvrecall models rm --unpacked` deletes it)."
    try:
        parent.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(parent).free < 4 * model.get_memory_footprint():
            raise OSError("the disk has little room")
        with FileLock(parent / ".lock", timeout=0):
            for left_over in parent.glob(".saving-*"):  # by the lock, of a process that was killed
                shutil.rmtree(left_over, ignore_errors=True)
            with tempfile.TemporaryDirectory(dir=parent, prefix=".saving-") as scratch:
                staged = Path(scratch) / "model"
                model.save_pretrained(staged)
                tokenizer.save_pretrained(staged)
                (staged / COMPLETE).write_text(json.dumps(_stamps(staged)), encoding="utf-8")
                for old in copies(escape(stem), dtype=dtype):
                    shutil.rmtree(old)
                staged.rename(folder)
    except Exception as error:  # a full or read-only disk, or another process that saves just now
        notice = f"The unpacked copy {folder} is not kept ({type(error).__name__}: {error})."
    if on_notice:
        on_notice(notice)

"""What known models take on the disk, and how it is given back."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from kvrecall.models.registry import KnownModel, known
from kvrecall.models.store import models_dir, path_of, stamp_path


def copies_of(model: KnownModel) -> list[Path]:
    """Unpacked copies of a model's file, also of files that have been replaced since."""
    pattern = re.compile(re.escape(path_of(model).stem) + r"-[0-9a-f]{12}-\w+")
    try:
        return sorted(path for path in (models_dir() / "unpacked").iterdir() if pattern.fullmatch(path.name))
    except OSError:
        return []


def stored_bytes(name: str) -> tuple[int, int]:
    """Bytes on the disk of a known model's file and of its unpacked copies. Raises `UnknownNameError`."""
    model = known(name)
    path = path_of(model)
    return _size(path), sum(_size(file) for folder in copies_of(model) for file in folder.rglob("*"))


def _size(path: Path) -> int:
    """Bytes of a file; 0 of what is none, or may not be looked at."""
    try:
        return path.stat().st_size if path.is_file() else 0
    except OSError:
        return 0


def remove(name: str, only_unpacked: bool = False) -> int:
    """Deletes a known model's file and its unpacked copies, or the copies alone; returns the bytes that were freed.

    A process that has them open keeps what it reads. Raises `UnknownNameError`, `OSError`.
    """
    model = known(name)
    own, unpacked = stored_bytes(name)
    for folder in copies_of(model):
        shutil.rmtree(folder)
    if only_unpacked:
        return unpacked
    for path in (stamp_path(path_of(model)), path_of(model)):
        path.unlink(missing_ok=True)
    return own + unpacked

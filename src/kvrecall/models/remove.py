"""What models take on the disk, and how it is given back."""

from __future__ import annotations

import shutil

from kvrecall.models import hub
from kvrecall.models.registry import known
from kvrecall.models.store import files_of, path_of, size_of
from kvrecall.models.unpack import bytes_of, copies


def stored_bytes(name: str) -> tuple[int, int]:
    """Bytes on the disk of a known model's file and of its unpacked copies. Raises `UnknownNameError`."""
    model = known(name)
    return sum(map(size_of, files_of(model))), sum(map(bytes_of, copies(path_of(model).stem)))


def remove(name: str, only_unpacked: bool = False) -> int:
    """Deletes a known model's file, from the model hub's cache too, and its unpacked copies, or the copies alone.

    Returns the bytes that were freed. A process that has them open keeps what it reads. Raises `UnknownNameError`, `OSError`.
    """
    model = known(name)
    own, unpacked = stored_bytes(name)
    remove_unpacked(path_of(model).stem)
    if only_unpacked:
        return unpacked
    path_of(model).unlink(missing_ok=True)
    hub.forget(model.repo, model.file)
    return own + unpacked


def remove_unpacked(stem: str | None = None) -> int:
    """Deletes the unpacked copies of files of this name (None: of all), and returns the bytes that were freed."""
    freed = 0
    for folder in copies(stem):
        freed += bytes_of(folder)
        shutil.rmtree(folder)
    return freed

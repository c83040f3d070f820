"""Whether what is stored is what was saved: the file of a known model and what was unpacked from it."""

from __future__ import annotations

from pathlib import Path

from kvrecall.core.errors import ModelFilesError
from kvrecall.models import manifest
from kvrecall.models.hub import Progress
from kvrecall.models.registry import known
from kvrecall.models.store import fetch_again, files_of, find, path_of, size_of, verify
from kvrecall.models.unpack import copies


def check(name: str, on_progress: Progress | None = None) -> Path:
    """Computes all hashes of a known model; returns the path of its file.

    Raises `ModelFilesError` if the file is missing or anything differs. A wrong file stays where it is, a wrong unpacked copy
    until the next load, which makes it anew.
    """
    model = known(name)
    if (path := find(name)) is None:
        if found := files_of(model):
            problem = f"{found[0]} has {size_of(found[0]):,} bytes, expected {model.bytes:,}"
            raise ModelFilesError(name, problem, fetch_again(model))
        raise ModelFilesError(name, "its file is not here", f"Run `kvrecall models pull {name}`.")
    verify(model, path, on_progress)
    for folder in copies(path_of(model).stem):
        check_folder(name, folder, on_progress)
    return path


def check_folder(name: str, folder: Path, on_progress: Progress | None = None) -> Path:
    """Hashes every file of an unpacked folder and returns it; raises `ModelFilesError`, which says what is wrong with it."""
    if problem := manifest.damage(folder, on_progress):
        raise ModelFilesError(name, f"the unpacked copy {folder} is damaged: {problem}", "The next load unpacks it anew.")
    return folder

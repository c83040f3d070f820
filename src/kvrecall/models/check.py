"""Whether what is stored is what was verified: the fetched file of a known model and what was unpacked from it."""

from __future__ import annotations

from pathlib import Path

from kvrecall.core.errors import ModelFilesError
from kvrecall.models import manifest
from kvrecall.models.store import Progress, check_file, models_dir
from kvrecall.models.unpack import folders_of


def check(name: str, on_progress: Progress | None = None) -> Path:
    """Computes all hashes of a known model again, whatever the stamps say; returns the path of its file.

    Raises `ModelFilesError` if the file is missing or anything differs. A wrong file stays where it is until the next pull, a
    wrong unpacked folder until the next load, which makes it anew.
    """
    path = check_file(name, on_progress)
    for folder in folders_of(path):
        check_folder(name, folder, on_progress)
    return path


def check_folder(name: str, folder: Path, on_progress: Progress | None = None) -> Path:
    """Hashes every file of an unpacked folder and returns it; raises `ModelFilesError`, which says what is wrong with it."""
    if problem := manifest.damage(folder, on_progress):
        raise ModelFilesError(name, f"the unpacked copy {folder} is damaged: {problem}", "The next load unpacks it anew.")
    return folder


def kept_folders() -> list[Path]:
    """Complete unpacked folders of any file, known or not, sorted by name."""
    try:
        return sorted(folder for folder in (models_dir() / "unpacked").iterdir() if manifest.is_sealed(folder))
    except OSError:
        return []

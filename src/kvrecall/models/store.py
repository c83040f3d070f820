"""Where the files of known models lie, and whether they are what they should be.

A file in `models_dir()`, put there by hand or by a script, comes before the model hub's cache. `find` compares sizes, which
costs nothing; the hash is computed where it counts: after a download, before weights are read, and by `check`.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from kvrecall.core.errors import ModelFilesError
from kvrecall.models import hub
from kvrecall.models.hub import Progress
from kvrecall.models.registry import KnownModel, known

BLOCK_BYTES = 1 << 24


def models_dir() -> Path:
    """`$KVRECALL_MODELS`, else `kvrecall/models` in the user's cache folder. May not exist yet."""
    if chosen := os.environ.get("KVRECALL_MODELS"):
        return Path(os.path.expanduser(chosen))
    base = os.environ.get("XDG_CACHE_HOME")
    return Path(base or os.path.expanduser("~/.cache")) / "kvrecall" / "models"


def path_of(model: KnownModel) -> Path:
    """Where a file of this model is looked for before the hub's cache, whether or not it is there."""
    return models_dir() / model.file


def files_of(model: KnownModel) -> list[Path]:
    """What lies where this model's file belongs, readable or not."""
    # Not Path.exists, which raises where a folder on the way may not be searched.
    places = [path_of(model), hub.cached(model.repo, model.file, model.revision)]
    return [path for path in places if path and os.path.lexists(path)]


def find(name: str) -> Path | None:
    """A known model's file, or None if it is missing or of another size. Raises `UnknownNameError`."""
    model = known(name)
    return next((path for path in files_of(model) if size_of(path) == model.bytes), None)


def size_of(path: Path) -> int:
    """Bytes of a file; 0 of what is none, or may not be looked at."""
    try:
        return path.stat().st_size if path.is_file() else 0
    except OSError:
        return 0


def verify(model: KnownModel, path: Path, on_progress: Progress | None = None) -> Path:
    """Computes the hash of a model's file and returns its path; raises `ModelFilesError` if it is another or cannot be read."""
    try:
        digest = sha256_of(path, on_progress)
    except OSError as error:
        remedy = "Check its permissions and the disk."
        raise ModelFilesError(model.name, f"{path} cannot be read ({error.strerror})", remedy) from error
    if digest != model.sha256:
        raise ModelFilesError(model.name, f"{path} has sha256 {digest}, expected {model.sha256}", fetch_again(model))
    return path


def fetch_again(model: KnownModel) -> str:
    """The remedy for a wrong file."""
    return f"Run `kvrecall models rm {model.name}`, then `kvrecall models pull {model.name}`."


def sha256_of(path: Path, on_progress: Progress | None = None) -> str:
    """SHA-256 of a file, hexadecimal."""
    digest, done, total = hashlib.sha256(), 0, path.stat().st_size
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
            done += len(block)
            if on_progress:
                on_progress(done, total)
    return digest.hexdigest()


def identity(path: Path) -> dict[str, int]:
    """What shows that a file was not touched. The inode's time cannot be set back, as the time of modification can."""
    status = path.stat()
    return {
        "bytes": status.st_size,
        "mtime_ns": status.st_mtime_ns,
        "ctime_ns": status.st_ctime_ns,
        "inode": status.st_ino,
    }

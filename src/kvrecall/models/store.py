"""The folder that keeps fetched weights, and the knowledge that they were verified.

Hashing takes 0.6 s per GB and more, so a verified file gets a stamp beside it with its size, its times and its inode; as long
as all match, the hash is not computed again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

from kvrecall.core.errors import ModelFilesError
from kvrecall.models.registry import KnownModel, known

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in total)."""

BLOCK_BYTES = 1 << 24


def models_dir() -> Path:
    """`$KVRECALL_MODELS`, else `kvrecall/models` in the user's cache folder. May not exist yet."""
    if chosen := os.environ.get("KVRECALL_MODELS"):
        return Path(os.path.expanduser(chosen))
    base = os.environ.get("XDG_CACHE_HOME")
    return Path(base or os.path.expanduser("~/.cache")) / "kvrecall" / "models"


def path_of(model: KnownModel) -> Path:
    """Where the file of this model belongs, whether or not it is there."""
    return models_dir() / model.filename


def find(name: str) -> Path | None:
    """The verified file of a known model, or None if it is missing or not the right one."""
    model = known(name)
    path = path_of(model)
    try:
        if not path.is_file() or path.stat().st_size != model.bytes:
            return None
        if _stamp_holds(path, model.sha256):
            return path
        if sha256_of(path) != model.sha256:
            return None
    except OSError:
        # A file that cannot be read is as good as none: `pull` puts another in its place or says what keeps it from it.
        return None
    write_stamp(path, model.sha256)
    return path


def is_there(model: KnownModel) -> bool:
    """Whether something lies where this model's file belongs, readable or not."""
    # Not Path.exists, which raises where a folder on the way may not be searched.
    return os.path.lexists(path_of(model))


def check_file(name: str, on_progress: Progress | None = None) -> Path:
    """Computes the hash of the stored file again, whatever its stamp says.

    Raises `ModelFilesError` if the file is missing or its bytes differ; a wrong file stays where it is until the next pull.
    """
    model = known(name)
    path = path_of(model)
    remedy = f"Run `kvrecall models pull {name}`."
    if not os.path.isfile(path):
        raise ModelFilesError(name, f"no file at {path}", remedy)
    try:
        digest = sha256_of(path, on_progress)
    except OSError as error:
        raise ModelFilesError(
            name, f"{path} cannot be read ({error.strerror})", "Check its permissions and the disk."
        ) from error
    if digest != model.sha256:
        with contextlib.suppress(OSError):
            stamp_path(path).unlink()
        raise ModelFilesError(name, f"{path} has sha256 {digest}, expected {model.sha256}", remedy)
    write_stamp(path, model.sha256)
    return path


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


def stamp_path(path: Path) -> Path:
    """The stamp that belongs to a file of weights."""
    return path.with_name(path.name + ".sha256-ok")


def write_stamp(path: Path, sha256: str) -> None:
    """Records that this file, as it is now, has this hash. A folder that cannot be written just goes without stamps."""
    try:
        stamp_path(path).write_text(json.dumps({"sha256": sha256, **identity(path)}), encoding="utf-8")
    except OSError:
        return


def _stamp_holds(path: Path, sha256: str) -> bool:
    try:
        stamp = json.loads(stamp_path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return stamp == {"sha256": sha256, **identity(path)}


def identity(path: Path) -> dict[str, int]:
    """What shows that a file was not touched. The inode's time cannot be set back, as the time of modification can."""
    status = path.stat()
    return {
        "bytes": status.st_size,
        "mtime_ns": status.st_mtime_ns,
        "ctime_ns": status.st_ctime_ns,
        "inode": status.st_ino,
    }

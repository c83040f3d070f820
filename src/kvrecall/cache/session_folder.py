"""The folder of a saved session: what may lie in it, who may write to it, and what is removed from it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from kvrecall.cache.session_files import FILE_NAME
from kvrecall.cache.session_index import NAME, read_index
from kvrecall.core.errors import SessionError

DATA = "data"
"""The folder of a session's files, beside its index."""
_LOCK = ".lock"
_DRAFT = re.compile(r"\.\d+-[0-9a-f]{8}\.draft")


@contextmanager
def locked(folder: Path) -> Iterator[Path]:
    """The folder, made if it is missing and locked against other savers. Raises SessionError where other files are in it,
    and where another process saves."""
    path = Path(os.path.realpath(folder))
    path.mkdir(parents=True, exist_ok=True)
    others = [name for name in os.listdir(path) if name not in (NAME, DATA, _LOCK) and not _DRAFT.fullmatch(name)]
    if others or (not (path / NAME).exists() and (path / DATA).is_dir() and _strangers(path / DATA)):
        remedy = "Give a new folder, or one that holds a session."
        raise SessionError(path, "an empty folder or a saved session", f"other files ({', '.join(sorted(others)[:3])})", remedy)
    try:
        with FileLock(path / _LOCK, timeout=0):
            (path / DATA).mkdir(exist_ok=True)
            yield path
    except Timeout:
        remedy = "Wait for it, or give another folder."
        raise SessionError(path, "a folder that nobody else saves to", "one that is being written", remedy) from None


def clean(path: Path) -> None:
    """Removes files that the folder's index does not name: of an older session, or of a save that came to no end."""
    with suppress(OSError, SessionError):
        used = {file.name for file in read_index(path)[0].files} if (path / NAME).exists() else set[str]()
        for name in os.listdir(path / DATA):
            if name not in used and FILE_NAME.fullmatch(name):
                (path / DATA / name).unlink()
        for name in os.listdir(path):
            if _DRAFT.fullmatch(name):
                (path / name).unlink()


def _strangers(data: Path) -> list[str]:
    return [name for name in os.listdir(data) if not FILE_NAME.fullmatch(name)]

"""The store of sessions that `--keep` leaves in the user's cache folder, found again by their texts, model and method.

The least recently used one is removed first. Each session is a folder, named by a hash. A process that uses a session holds a
lock on a file beside it. The system releases that lock when the process ends, and a locked session is never removed. A new
session is written to another folder and renamed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvrecall.core.errors import ParameterError
from kvrecall.core.private_folder import PrivateFolder
from kvrecall.core.whole_files import written_to

_USE, _LOCK = ".use", ".lock"
_DRAFT = re.compile(r"\..+\.[0-9a-f]{8}")
"""A session that is being written, or that is about to be deleted."""
NO_LIMIT = 2**63 - 1


def store_folder() -> Path:
    """`$KVRECALL_SESSIONS`, else `kvrecall/sessions` in the user's cache folder. May not exist yet."""
    if chosen := os.environ.get("KVRECALL_SESSIONS"):
        return Path(os.path.expanduser(chosen))
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "kvrecall" / "sessions"


def document_key(texts: Sequence[str], document: Any) -> str:
    """A name for a document (`engine.Document`) of these texts: a hash of them, the model, the method and its settings, and the
    form of rows in host memory."""
    from kvrecall.backends.transformers.fingerprint import fingerprint_of
    from kvrecall.cache.session_folder import VERSION
    from kvrecall.methods.registry import name_of
    from kvrecall.methods.settings import settings_of

    model, method = document.model, document.cache.method
    fingerprint = fingerprint_of(model)
    hashes = [hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest() for text in texts]
    how = [VERSION, fingerprint.config, fingerprint.weights, str(model.dtype), name_of(method), settings_of(method)]
    how += [document.cache.host_rows] if document.cache.fp8_rows else []
    return hashlib.sha256(json.dumps([hashes, how], sort_keys=True).encode()).hexdigest()[:32]


@dataclass(frozen=True)
class StoreResult:
    """The outcome of `SessionStore.put`. kept: whether the session is in the store. nbytes: its bytes on disk. total_bytes:
    those of all sessions. removed: how many sessions were removed for it."""

    kept: bool
    nbytes: int
    total_bytes: int
    removed: int


@dataclass(frozen=True)
class StoredSession:
    """A session of the store. nbytes: its bytes on disk. last_used: in seconds since 1970. in_use: by a process, now."""

    name: str
    folder: Path
    nbytes: int
    last_used: float
    in_use: bool


class SessionStore:
    """The sessions of a folder. limit_bytes: bytes on disk that all of them may take together."""

    def __init__(self, folder: Path, limit_bytes: int = NO_LIMIT) -> None:
        """Makes the folder. Raises OutputFileError."""
        self.folder, self.limit_bytes = folder, limit_bytes
        with written_to(folder), PrivateFolder(folder, make=True):
            pass

    @contextmanager
    def _locked(self) -> Iterator[PrivateFolder]:
        """The folder, held for moments, while a session is renamed, removed or marked as used. Raises OutputFileError."""
        with written_to(self.folder), PrivateFolder(self.folder) as folder, folder.locked(_LOCK):
            yield folder

    @contextmanager
    def lease(self, name: str) -> Iterator[Path]:
        """The folder of a session, which may not exist. Inside the block nobody removes it, and it counts as used now."""
        place, use = self.folder / name, f"{name}.{os.getpid()}-{os.urandom(4).hex()}{_USE}"
        with ExitStack() as stack:
            with self._locked() as folder:
                stack.callback((self.folder / use).unlink, missing_ok=True)
                stack.enter_context(folder.locked(use))
                if is_folder(place):
                    os.utime(place)
                    with PrivateFolder(name, within=folder) as session:
                        session.close_to_others()
            yield place

    def put(self, name: str, save: Callable[[Path], object], *, replace: bool = False) -> StoreResult:
        """Keeps the session that `save` writes to the folder it is given. replace: whether it replaces a session of this name;
        otherwise the existing one stays, since it holds the same.

        A session that alone exceeds the limit is not kept. Raises the errors of `save`, and OutputFileError.
        """
        draft = f".{name}.{os.urandom(4).hex()}"
        with self.lease(draft) as place:
            try:
                save(place)
                nbytes = disk_bytes(place)
                with self._locked() as folder:
                    target, removed = self.folder / name, 0
                    if fits := nbytes <= self.limit_bytes:
                        removed = self._make_room(folder, nbytes, but=name)
                        if os.path.lexists(target) and (replace or not is_folder(target)):
                            self._retire(name)
                        if not os.path.lexists(target):
                            place.rename(target)
                    total = sum(map(disk_bytes, self._sessions()))
            finally:
                shutil.rmtree(place, ignore_errors=True)
        self.clean()
        return StoreResult(fits, nbytes, total, removed)

    def sessions(self) -> list[StoredSession]:
        """All sessions, the most recently used first."""
        with self._locked() as folder:
            return [
                StoredSession(path.name, path, disk_bytes(path), path.stat().st_mtime, _in_use(folder, path.name))
                for path in reversed(self._sessions())
            ]

    def find(self, text: str) -> StoredSession:
        """The one session whose name begins with `text`. Raises ParameterError if there is none, or several."""
        matches = [session for session in self.sessions() if text and session.name.startswith(text)]
        if len(matches) != 1:
            remedy = f"{len(matches)} names begin so: give more of it." if matches else "See `kvrecall sessions list`."
            raise ParameterError("session", "the name of a kept session, or how one name alone begins", text, remedy)
        return matches[0]

    def remove(self, names: Sequence[str]) -> None:
        """Removes sessions by their whole names; names without a session are skipped.

        Raises ParameterError, and removes nothing, if a process uses one of them.
        """
        with self._locked() as folder:
            sessions = [name for name in names if is_folder(self.folder / name)]
            for name in sessions:
                if _in_use(folder, name):
                    remedy = "Wait until the process ends; nothing was removed."
                    raise ParameterError("session", "one that no process uses", name, remedy)
            for name in sessions:
                self._retire(name)
        self.clean()

    def clean(self) -> None:
        """Deletes the folders of removed sessions, and those that a process left when it ended while saving."""
        with self._locked() as folder:
            drafts = [path for path in self.folder.iterdir() if _DRAFT.fullmatch(path.name) and not _in_use(folder, path.name)]
        for path in drafts:
            if is_folder(path):
                shutil.rmtree(path, ignore_errors=True)
            else:  # a link, a file: what stood in a session's place
                path.unlink(missing_ok=True)

    def _sessions(self) -> list[Path]:
        """The least recently used one first."""
        folders = [path for path in self.folder.iterdir() if is_folder(path) and path.name[:1] != "."]
        return sorted(folders, key=lambda path: path.stat().st_mtime_ns)

    def _make_room(self, folder: PrivateFolder, nbytes: int, but: str) -> int:
        """Removes unused sessions until `nbytes` more fit; returns how many. but: a session that does not count, because it
        will be replaced."""
        sizes = {path.name: disk_bytes(path) for path in self._sessions() if path.name != but}
        before = len(sizes)
        for name in list(sizes):
            if sum(sizes.values()) + nbytes <= self.limit_bytes:
                break
            if not _in_use(folder, name):
                self._retire(name)
                del sizes[name]
        return before - len(sizes)

    def _retire(self, name: str) -> None:
        (self.folder / name).rename(self.folder / f".{name}.{os.urandom(4).hex()}")


def _in_use(folder: PrivateFolder, name: str) -> bool:
    for use in folder.names():
        if use.startswith(f"{name}.") and use.endswith(_USE):
            try:
                with folder.locked(use, wait=False):
                    folder.remove(use)  # of a process that has ended
            except BlockingIOError:
                return True
    return False


def is_folder(path: Path) -> bool:
    """Whether a folder, and not a link to one, has a name."""
    return path.is_dir() and not path.is_symlink()


def disk_bytes(folder: Path) -> int:
    """Bytes that a folder's content takes on disk. Holes in files take none; files that vanish meanwhile are skipped."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(OSError):
            about = path.lstat()
            total += about.st_blocks * 512 if hasattr(about, "st_blocks") else about.st_size
    return total

"""The folder of a saved session: what may lie in it, who may write to it, and what is removed from it."""

from __future__ import annotations

import re
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from kvrecall.cache.session_files import FILE_NAME, OpenFiles
from kvrecall.cache.session_index import NAME, SavedSession, checksum_of, index_of, opened
from kvrecall.core.errors import SessionError
from kvrecall.core.private_folder import PrivateFolder

DATA = "data"
"""The folder of a session's files, beside its index."""
_LOCK = ".lock"
_DRAFT = re.compile(r"\.\d+-[0-9a-f]{8}\.draft")
_TRIES = 8
"""Another process may save while the files of a session are opened; then the new session is read."""


@contextmanager
def opened_files(path: str | Path) -> Iterator[tuple[SavedSession, str, OpenFiles]]:
    """The index of a folder, its checksum, and the files that it names, all of one save. Raises SessionError."""
    with opened(path) as folder, ExitStack() as stack:
        for tries in range(_TRIES):
            session, checksum = index_of(folder)
            try:
                data = stack.enter_context(PrivateFolder(DATA, within=folder))
                files = stack.enter_context(OpenFiles.of(data, {file.name: file.nbytes for file in session.files}))
                break
            except FileNotFoundError as error:
                if tries == _TRIES - 1 or checksum_of(folder) == checksum:
                    raise SessionError(error.filename, "a file of the session", "none") from None
        yield session, checksum, files


def holds_session(path: str | Path) -> bool:
    """Whether a folder holds an index. Raises SessionError for a folder that a session cannot be saved to, and OSError."""
    with PrivateFolder(path) as folder:
        _check(folder)
        return NAME in folder.names()


@contextmanager
def locked(path: str | Path) -> Iterator[PrivateFolder]:
    """The folder, made if it is missing and locked against other savers. Raises SessionError where other files are in it,
    and where another process saves."""
    with PrivateFolder(path, make=True) as folder:
        _check(folder)
        try:
            with folder.locked(_LOCK, wait=False):
                folder.close_to_others()
                yield folder
        except BlockingIOError:
            remedy = "Wait for it, or give another folder."
            got = "one that is being written"
            raise SessionError(folder.path, "a folder that nobody else saves to", got, remedy) from None


def _check(folder: PrivateFolder) -> None:
    """Raises SessionError for a folder with anything that no session has."""
    names = folder.names()
    others = [name for name in names if name not in (NAME, DATA, _LOCK) and not _DRAFT.fullmatch(name)]
    for name in set(names) - set(others):
        folder.check(name, stat.S_IFDIR if name == DATA else stat.S_IFREG)
    if DATA in names:
        with PrivateFolder(DATA, within=folder) as data:
            files = data.names()
            for name in files:
                data.check(name)
        others += [] if NAME in names else [name for name in files if not FILE_NAME.fullmatch(name)]
    if others:
        remedy = "Give a new folder, or one that holds a session."
        raise SessionError(
            folder.path, "an empty folder or a saved session", f"other files ({', '.join(sorted(others)[:3])})", remedy
        )


def clean(folder: PrivateFolder) -> None:
    """Removes files that the folder's index does not name: of an older session, or of a save that came to no end."""
    with suppress(OSError, SessionError), PrivateFolder(DATA, within=folder) as data:
        names = folder.names()
        used = {file.name for file in index_of(folder)[0].files} if NAME in names else set[str]()
        for name in data.names():
            if name not in used and FILE_NAME.fullmatch(name):
                data.remove(name)
        for name in names:
            if _DRAFT.fullmatch(name):
                folder.remove(name)

"""A folder whose files are its owner's alone: every file of a session, and every lock beside one, is opened here.

The folder is opened once and names are looked up in it (`openat`), so nobody can put another folder in its place. Folders are
made with mode 0700 and files with 0600, whatever the umask. In the folder no link is followed, and nothing but a plain file is
opened: a pipe would block, a device may do anything.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvrecall.core.errors import ParameterError, SessionError

_SAFE = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0)
_FOLDER = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | _SAFE
_KINDS = {
    stat.S_IFREG: "a plain file", stat.S_IFDIR: "a folder", stat.S_IFLNK: "a symbolic link", stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device",
}  # fmt: skip
_REMEDY = "Remove it, or give another folder."


class PrivateFolder:
    """An open folder, closed at the end of a `with` block."""

    def __init__(self, path: str | Path, *, make: bool = False, within: PrivateFolder | None = None) -> None:
        """path: of the folder; a link to it is followed, because it is the user who gives it. within: the folder in which
        `path` is a name; then a link is refused. make: makes it if it is missing.

        Raises SessionError for another thing than a folder in `within`, and OSError.
        """
        if not isinstance(path, str | Path) or "\0" in str(path):
            raise ParameterError("folder", "a path", path, "Give a text or a pathlib.Path.")
        parent = None if within is None else within._descriptor
        self.path = Path(os.path.realpath(path)) if within is None else within.path / path
        name = self.path if within is None else path
        if make:
            if within is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=parent)
        if within is not None:
            within.check(str(path), stat.S_IFDIR)
        self._descriptor = os.open(name, _FOLDER, dir_fd=parent)

    def __enter__(self) -> PrivateFolder:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def names(self) -> list[str]:
        """The names in it."""
        return os.listdir(self._descriptor)

    def close_to_others(self) -> None:
        """Takes a folder's permissions from other users, if it is this user's."""
        with suppress(PermissionError):
            os.fchmod(self._descriptor, 0o700)

    def check(self, name: str, kind: int = stat.S_IFREG) -> None:
        """Raises SessionError unless a name stands for a plain file, or for another `kind`. A missing one passes."""
        try:
            mode = os.stat(name, dir_fd=self._descriptor, follow_symlinks=False).st_mode
        except FileNotFoundError:
            return
        if stat.S_IFMT(mode) != kind:
            raise SessionError(self.path / name, _KINDS[kind], _KINDS.get(stat.S_IFMT(mode), "another thing"), _REMEDY)

    def open(self, name: str, flags: int = os.O_RDONLY) -> int:
        """The descriptor of a plain file. flags: as for `os.open`; a new file has mode 0600.

        Raises SessionError for anything else, before it is opened, and for a file to write that has a second name elsewhere;
        OSError.
        """
        self.check(name)
        descriptor = os.open(name, flags | _SAFE | getattr(os, "O_NONBLOCK", 0), 0o600, dir_fd=self._descriptor)
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode) or (flags & (os.O_WRONLY | os.O_RDWR) and about.st_nlink > 1):
            os.close(descriptor)
            got = "a file with a second name" if stat.S_ISREG(about.st_mode) else "something else"
            raise SessionError(self.path / name, "a plain file", got, _REMEDY)
        return descriptor

    def write(self, name: str, content: bytes) -> None:
        """Writes a file completely or not at all, in the place of an existing one. Raises OSError."""
        draft = f".{os.getpid()}-{os.urandom(4).hex()}.draft"
        try:
            with os.fdopen(self.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(draft, name, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)
        finally:
            with suppress(OSError):
                self.remove(draft)

    def remove(self, name: str) -> None:
        """Removes a file, or a link and not what it leads to. Raises OSError."""
        os.unlink(name, dir_fd=self._descriptor)

    def sync(self) -> None:
        """Writes the folder's names to disk."""
        with suppress(OSError):  # some systems cannot do so
            os.fsync(self._descriptor)

    @contextmanager
    def locked(self, name: str, *, wait: bool = True) -> Iterator[None]:
        """Holds the lock on a file, which is made if it is missing; the system releases it when the process ends.

        wait: False raises BlockingIOError if it is taken.
        """
        import fcntl  # not on every system

        descriptor = self.open(name, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            yield
        finally:
            os.close(descriptor)

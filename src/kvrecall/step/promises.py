"""What engines of this user have promised to take of this machine's host memory, and what they were refused.

Every rank has a record: a file in a private folder, which the rank keeps locked. Records of ended processes are not locked, so
they do not count. All engines and ranks that one command starts are one launch: they divide memory among themselves.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from typing import ClassVar

from kvrecall.cache.host_memory import available_host_bytes
from kvrecall.core.errors import SessionError
from kvrecall.core.private_folder import PrivateFolder

_LOCK = "lock"
"""The file that is locked while records are read or written."""


@dataclass(frozen=True)
class Record:
    """Of one rank. launch, engine: whose. promised: bytes that it may take. taken: bytes that it has. refused: blocks with
    memory, after the system refused more."""

    launch: str
    engine: int
    promised: int
    taken: int = 0
    refused: int | None = None


class Promise:
    """This process's record, until it ends or makes another one."""

    _latest: ClassVar[Promise | None] = None

    def __init__(self, record: Record) -> None:
        """Raises OSError and SessionError if there can be no record."""
        if Promise._latest is not None:
            Promise._latest.close()
        self._record, self._name = record, f"{os.getpid()}-{os.urandom(4).hex()}"
        with ExitStack() as stack:
            self._folder = stack.enter_context(_open())
            with self._folder.locked(_LOCK):
                stack.enter_context(self._folder.locked(self._name))
            self._held = stack.pop_all()
        Promise._latest = self
        self.tell()

    def tell(self, **changed: int) -> None:
        """Writes the record, with fields changed. Raises OSError and SessionError."""
        self._record = replace(self._record, **changed)
        with self._folder.locked(_LOCK):
            with os.fdopen(self._folder.open(self._name, os.O_WRONLY | os.O_TRUNC), "w") as file:
                json.dump(asdict(self._record), file)
            os.utime(self._folder.path)  # `Watch` looks at it

    def close(self) -> None:
        """Removes the record."""
        with suppress(OSError), self._folder.locked(_LOCK):
            self._folder.remove(self._name)
        self._held.close()


class Watch:
    """Looks whether a rank of one engine was refused memory."""

    def __init__(self, launch: str, engine: int) -> None:
        self._launch, self._engine, self._seen = launch, engine, -1

    def refused(self) -> int | None:
        """The fewest blocks that a rank has memory for since it was refused more; None if no record has changed since the last
        call, or nothing was refused. Takes some microseconds without changes."""
        try:
            changed = os.stat(_path()).st_mtime_ns
        except OSError:
            return None
        if changed == self._seen:
            return None
        self._seen = changed
        own = (r.refused for r in _records() if (r.launch, r.engine) == (self._launch, self._engine))
        return min((blocks for blocks in own if blocks is not None), default=None)


def free_bytes(launch: str = "") -> int:
    """Available host memory, without what other launches have promised and not taken yet, and with what this one has taken."""
    records = _records()
    left = sum(max(0, r.promised - r.taken) for r in records if r.launch != launch)
    return max(0, available_host_bytes() - left + sum(r.taken for r in records if r.launch == launch))


def _path() -> str:
    user = os.getuid() if hasattr(os, "getuid") else "user"
    return os.path.join(tempfile.gettempdir(), f"kvrecall-{user}")  # not in the home folder, which machines may share


@contextmanager
def _open(make: bool = True) -> Iterator[PrivateFolder]:
    """The folder, which must be this user's. Raises OSError and SessionError."""
    parent, name = os.path.split(_path())
    with PrivateFolder(parent) as within, PrivateFolder(name, make=make, within=within) as folder:
        if hasattr(os, "getuid") and os.stat(folder.path).st_uid != os.getuid():
            raise PermissionError(f"{folder.path} is another user's")
        yield folder


def _records() -> list[Record]:
    """Of all processes that live; removes the others. Nothing if there is no folder."""
    found: list[Record] = []
    with suppress(OSError, SessionError), _open(make=False) as folder, folder.locked(_LOCK):
        for name in folder.names():
            if name == _LOCK:
                continue
            try:
                with folder.locked(name, wait=False):
                    folder.remove(name)
            except BlockingIOError:  # its process lives
                with suppress(ValueError, TypeError), os.fdopen(folder.open(name)) as file:
                    found.append(Record(**json.load(file)))
    return found

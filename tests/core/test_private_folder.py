"""Private folders: what is made is its owner's alone, and nothing but a plain file is opened."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from kvrecall.core.errors import SessionError
from kvrecall.core.private_folder import PrivateFolder


def _socket(path: Path) -> None:
    there = os.getcwd()
    os.chdir(path.parent)  # a socket's whole path may have 108 characters
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(there)


def _link(path: Path, target: Path) -> None:
    path.symlink_to(target)


def _device(path: Path) -> None:
    try:
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))  # /dev/zero
    except PermissionError:  # of the superuser alone; a link to one is what others can make
        path.symlink_to("/dev/zero")


ODD: dict[str, Callable[[Path, Path], None]] = {
    "pipe": lambda path, _: os.mkfifo(path),
    "socket": lambda path, _: _socket(path),
    "device": lambda path, _: _device(path),
    "link to a file": lambda path, other: _link(path, other / "file"),
    "link to a folder": lambda path, other: _link(path, other / "folder"),
    "link to nothing": lambda path, other: _link(path, other / "nothing"),
}
"""Makes a name that is neither a file nor a folder; the second path has a file and a folder of somebody else."""


def others(folder: Path) -> Path:
    """A folder with a file and a folder of somebody else, which nobody may touch."""
    (folder / "folder").mkdir(parents=True)
    (folder / "file").write_text("theirs")
    (folder / "folder" / "00000001-0-0123456789abcdef.bin").write_text("theirs")
    return folder


def untouched(folder: Path) -> bool:
    """Whether `others` are what they were."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return [path.read_text() for path in files] == ["theirs"] * 2 and not (folder / "nothing").exists()


def modes(folder: Path) -> dict[str, int]:
    """Permissions of everything in a folder."""
    return {str(path.relative_to(folder)): stat.S_IMODE(path.lstat().st_mode) for path in [folder, *folder.rglob("*")]}


@pytest.mark.parametrize("umask", [0, 0o022, 0o077])
def test_what_is_made_is_its_owners_alone(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        with PrivateFolder(tmp_path / "s", make=True) as folder, PrivateFolder("data", within=folder, make=True) as data:
            folder.write("index", b"1")
            folder.write("index", b"22")
            os.close(data.open("rows", os.O_WRONLY | os.O_CREAT | os.O_EXCL))
            with folder.locked("lock"):
                pass
    finally:
        os.umask(before)
    assert modes(tmp_path / "s") == {".": 0o700, "data": 0o700, "index": 0o600, "data/rows": 0o600, "lock": 0o600}
    assert (tmp_path / "s" / "index").read_bytes() == b"22"


@pytest.mark.parametrize("kind", [*ODD, "folder"])
def test_only_plain_files_are_opened(tmp_path: Path, kind: str) -> None:
    """Whether to read, to write or to lock them; at once, and nothing behind a link changes."""
    theirs, own = others(tmp_path / "theirs"), tmp_path / "own"
    own.mkdir()
    if kind == "folder":
        (own / "name").mkdir()
    else:
        ODD[kind](own / "name", theirs)
    with PrivateFolder(own) as folder:
        for flags in (os.O_RDONLY, os.O_RDWR | os.O_CREAT):
            with pytest.raises(SessionError, match="name: expected a plain file, got a"):
                folder.open("name", flags)
        with pytest.raises(SessionError, match="expected a plain file"), folder.locked("name"):
            pass
        if kind != "folder":
            with pytest.raises(SessionError, match="name: expected a folder, got a"):
                PrivateFolder("name", within=folder, make=True)
    assert untouched(theirs)


def test_a_link_is_followed_where_the_user_gives_it_but_not_within(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with PrivateFolder(tmp_path / "link" / "s", make=True) as folder:
        assert folder.path == tmp_path / "real" / "s"
    with PrivateFolder(tmp_path / "link") as folder:
        assert folder.path == tmp_path / "real"


def test_a_file_with_a_second_name_is_read_but_never_written(tmp_path: Path) -> None:
    (tmp_path / "theirs").write_text("theirs")
    with PrivateFolder(tmp_path / "s", make=True) as folder:
        os.link(tmp_path / "theirs", tmp_path / "s" / "name")
        os.close(folder.open("name"))
        with pytest.raises(SessionError, match="expected a plain file, got a file with a second name"), folder.locked("name"):
            pass
        folder.write("name", b"mine")  # another file takes the name
    assert (tmp_path / "theirs").read_text() == "theirs" and (tmp_path / "s" / "name").read_text() == "mine"


def test_a_folder_that_is_put_in_its_place_is_not_seen(tmp_path: Path) -> None:
    with PrivateFolder(tmp_path / "s", make=True) as folder:
        (tmp_path / "s").rename(tmp_path / "before")
        (tmp_path / "s").mkdir()
        folder.write("index", b"1")
    assert (tmp_path / "before" / "index").exists() and not any((tmp_path / "s").iterdir())


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    with PrivateFolder(tmp_path, make=True) as folder:
        (tmp_path / "name").mkdir()
        with pytest.raises(IsADirectoryError):
            folder.write("name", b"1")
        assert folder.names() == ["name"]


def test_a_lock_is_held_by_one(tmp_path: Path) -> None:
    with PrivateFolder(tmp_path) as folder:
        with folder.locked("lock"), pytest.raises(BlockingIOError), folder.locked("lock", wait=False):
            pass
        with folder.locked("lock", wait=False):
            pass

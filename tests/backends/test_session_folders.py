"""Folders of sessions that somebody has tampered with, and who may read them."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvrecall import RetrievalCache
from kvrecall.backends.transformers.session import read_info
from kvrecall.cache import session_files
from kvrecall.core.errors import HostMemoryError, SessionError
from tests.backends.models import tiny
from tests.backends.test_session_damage import read
from tests.backends.test_sessions import decode
from tests.blocks import small_blocks
from tests.core.test_private_folder import ODD, modes, others, untouched


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("llama", num_hidden_layers=1)


@pytest.fixture(scope="module")
def cache(model: Any) -> Iterator[RetrievalCache]:
    with pytest.MonkeyPatch.context() as patched:
        small_blocks(patched)
        yield read(model, "exact")


@pytest.fixture(scope="module")
def saved(cache: RetrievalCache, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that tests copy."""
    folder = tmp_path_factory.mktemp("saved") / "s"
    cache.save(folder)
    return folder


@pytest.mark.parametrize("umask", [0, 0o022, 0o077])
def test_a_session_is_its_owners_alone(cache: RetrievalCache, tmp_path: Path, umask: int) -> None:
    """Also one that others could read before."""
    old = shutil.copytree(cache.save(tmp_path / "first").folder, tmp_path / "old")
    for folder in (old, old / "data"):
        folder.chmod(0o755)
    before = os.umask(umask)
    try:
        cache.save(tmp_path / "new")
        cache.save(old)
    finally:
        os.umask(before)
    for folder in (tmp_path / "new", old):
        found = modes(folder)
        assert {found.pop("."), found.pop("data")} == {0o700} and set(found.values()) == {0o600}


def replaceable(folder: Path) -> list[Path]:
    """Every name that a session may have, one of a draft included."""
    draft = folder / ".1234-0123abcd.draft"
    return [folder / "session.json", folder / "data", folder / ".lock", *sorted((folder / "data").iterdir()), draft]


@pytest.mark.parametrize("kind", ODD)
def test_what_is_no_file_is_refused_before_it_is_opened(
    model: Any, cache: RetrievalCache, saved: Path, tmp_path: Path, kind: str
) -> None:
    theirs = others(tmp_path / "theirs")
    for number, name in enumerate(path.relative_to(saved) for path in replaceable(saved)):
        folder = shutil.copytree(saved, tmp_path / f"{number}")
        path = folder / name
        if path.is_dir():
            shutil.rmtree(path)
        elif path.exists():
            path.unlink()
        ODD[kind](path, theirs)
        content = sorted(folder.rglob("*"))
        expected = "a folder" if path.name == "data" else "a plain file"
        with pytest.raises(SessionError, match=f"expected {expected}, got a "):
            cache.save(folder)
        assert sorted(folder.rglob("*")) == content
        if path.suffix not in (".lock", ".draft") and path.name != ".lock":
            for use in (lambda at: RetrievalCache.load(at, model.config), read_info):
                with pytest.raises(SessionError, match=f"expected {expected}, got a "):
                    use(folder)
    assert untouched(theirs)


def test_a_link_to_a_session_is_the_session(model: Any, cache: RetrievalCache, saved: Path, tmp_path: Path) -> None:
    """The user gives it. What lies in the folder is another matter."""
    folder, link = shutil.copytree(saved, tmp_path / "there"), tmp_path / "link"
    link.symlink_to(folder)
    assert read_info(link).folder == folder
    assert torch.equal(decode(model, RetrievalCache.load(link, model.config), 2), decode(model, cache.fork(), 2))
    cache.save(link)
    assert link.is_symlink() and read_info(folder).tokens == cache.get_seq_length()


def test_files_with_a_second_name_elsewhere_are_read_and_stay(
    model: Any, cache: RetrievalCache, saved: Path, tmp_path: Path
) -> None:
    """As copies made by `cp -al` have; but a lock is never written to elsewhere."""
    folder = shutil.copytree(saved, tmp_path / "copy", copy_function=os.link)
    held = {path: path.read_bytes() for path in saved.rglob("*") if path.is_file()}
    assert RetrievalCache.load(folder, model.config).get_seq_length() == cache.get_seq_length()
    with pytest.raises(SessionError, match=r"\.lock: expected a plain file, got a file with a second name"):
        cache.save(folder)
    (folder / ".lock").unlink()
    cache.save(folder)
    assert {path: path.read_bytes() for path in saved.rglob("*") if path.is_file()} == held


def made_up(folder: Path, change: Any) -> None:
    """Replaces the index by what `change` makes of its text, with the checksum that it must have."""
    path = folder / "session.json"
    body = change(path.read_text().split(", ", 1)[1])
    path.write_text(f'{{"checksum": "{hashlib.sha256(body.encode()).hexdigest()}", {body}')


def of_index(change: Any) -> Any:
    """`change` applied to the index as a dict."""

    def text(body: str) -> str:
        told = json.loads("{" + body)
        change(told)
        return json.dumps(told)[1:] + "\n"

    return text


def refreshing(told: dict[str, Any]) -> None:
    told["layers"]["0"]["values"]["static.0.refresh?"] = True


def first_tensor(told: dict[str, Any]) -> dict[str, Any]:
    return next(iter(told["cache"]["tensors"].values()))


def renamed(name: str) -> Any:
    return of_index(lambda told: told["files"][0].update(name=name))


HOSTILE: dict[str, tuple[Any, str]] = {
    "deep": (lambda body: '"a": ' + "[" * 200_000 + "]" * 200_000 + ", " + body, "nested too deeply"),
    "a key twice": (lambda body: '"tokens": 3, ' + body, "'tokens' twice"),
    "a long number": (lambda body: '"tokens": ' + "9" * 10_000 + ", " + body, "JSON"),
    "a name upwards": (renamed("../../../etc/passwd"), "a name that `save` gives"),
    "an absolute name": (renamed("/etc/passwd"), "a name that `save` gives"),
    "a name with a NUL": (renamed("00000000-0-0123456789abcdef.bin\0"), "a name that `save` gives"),
    "a name of another session": (renamed("00000009-0-0123456789abcdef.bin"), "a file of the session"),
    "empty and huge": (of_index(lambda told: first_tensor(told).update(shape=[0, 2**47, 2**47])), "expected"),
    "a static set that has none": (of_index(refreshing), "refresh.: expected false without an index and a static set"),
    "another dtype": (of_index(lambda told: first_tensor(told).update(dtype="bool")), "expected"),
}  # fmt: skip


@pytest.mark.parametrize("how", HOSTILE)
def test_an_index_that_was_made_to_do_harm_is_refused(model: Any, saved: Path, tmp_path: Path, how: str) -> None:
    change, expected = HOSTILE[how]
    folder = shutil.copytree(saved, tmp_path / "s")
    made_up(folder, change)
    with pytest.raises(SessionError, match=expected):
        RetrievalCache.load(folder, model.config)


def test_sparse_files_of_a_terabyte_are_refused_before_they_are_read(
    model: Any, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tensor of the cache that is as large; and an index."""
    folder, size = shutil.copytree(saved, tmp_path / "s"), 1 << 40

    def grown(told: dict[str, Any]) -> None:
        tensor = first_tensor(told)
        told["files"][tensor["file"]]["nbytes"] = size
        tensor |= {"shape": [1, size // 16], "dtype": "int64", "offset": 0}

    made_up(folder, of_index(grown))
    told = json.loads((folder / "session.json").read_text())
    os.truncate(folder / "data" / told["files"][first_tensor(told)["file"]]["name"], size)
    monkeypatch.setattr(session_files, "available_host_bytes", lambda: 64 << 30)
    start = time.monotonic()
    with pytest.raises(HostMemoryError):
        RetrievalCache.load(folder, model.config)
    with pytest.raises(HostMemoryError):
        read_info(folder)
    with (folder / "session.json").open("r+b") as file:
        file.truncate(size)
    with pytest.raises(SessionError, match="an index of at most"):
        RetrievalCache.load(folder, model.config)
    assert time.monotonic() - start < 5


def test_saves_of_another_process_beside_loads(model: Any, cache: RetrievalCache, tmp_path: Path) -> None:
    """Each load gives one of the two sessions, whole."""
    longer = cache.fork()
    decode(model, longer, 4, seed=7)
    expected = {each.get_seq_length(): decode(model, each.fork(), 2) for each in (cache, longer)}
    folder = tmp_path / "s"
    cache.save(folder)
    child = os.fork()
    if not child:
        try:
            torch.set_num_threads(1)
            while True:
                for each in (longer, cache):
                    each._session = None  # everything is written again
                    each.save(folder)
        finally:
            os._exit(1)
    try:
        for _ in range(25):
            loaded = RetrievalCache.load(folder, model.config)
            logits = expected[loaded.get_seq_length()]
            assert torch.equal(decode(model, loaded, 2), logits)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)

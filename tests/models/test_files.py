"""Where files are kept, and when their hashes are computed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvrecall.core.errors import ModelFilesError
from kvrecall.models import check, files, find, load, models_dir, pull
from kvrecall.models.files import remove
from kvrecall.models.registry import KnownModel
from tests.models import child
from tests.models.conftest import CONTENT, FILE, NAME
from tests.models.fake_hub import FakeHub


def test_where_models_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVRECALL_MODELS", str(tmp_path / "chosen"))
    assert models_dir() == tmp_path / "chosen"
    monkeypatch.delenv("KVRECALL_MODELS")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert models_dir() == tmp_path / "kvrecall" / "models"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert models_dir() == tmp_path / ".cache" / "kvrecall" / "models"


def test_finding_hashes_nothing(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    path = pull(NAME)
    monkeypatch.setattr(files, "sha256_of", lambda *_: pytest.fail("hashed"))
    assert find(NAME) == path == pull(NAME)


def test_changed_bytes_are_never_loaded(known_model: KnownModel, models_folder: Path, hub_cache: Path) -> None:
    models_folder.mkdir()
    (models_folder / FILE).write_bytes(CONTENT[:-1] + b"?")
    with pytest.raises(ModelFilesError, match=rf"{known_model.sha256}\. Run `kvrecall models rm {NAME}`"):
        load(NAME, dtype="float32", device="cpu")


def test_check_computes_the_hash(hub: FakeHub) -> None:
    path = pull(NAME)
    assert check(NAME) == path
    before = path.stat()
    path.resolve().write_bytes(CONTENT[:-1] + b"?")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(ModelFilesError, match="expected 2,000,006 and " + files.known(NAME).sha256):
        check(NAME)


@pytest.mark.parametrize(
    "content, told",
    [(None, f"its file is not here. Run `kvrecall models pull {NAME}`"), (b"short", "has 5 bytes and .* expected 2,000,006")],
)
def test_check_of_what_is_not_there(
    known_model: KnownModel, models_folder: Path, hub_cache: Path, content: bytes | None, told: str
) -> None:
    models_folder.mkdir()
    if content:
        (models_folder / FILE).write_bytes(content)
    with pytest.raises(ModelFilesError, match=told):
        check(NAME)


@pytest.mark.parametrize("mode", [0o000, 0o444])
def test_folders_that_may_not_be_searched(hub: FakeHub, open_folder: Path, mode: int) -> None:
    """As a user without rights: there is no traceback, and the file is not there."""
    (open_folder / FILE).write_bytes(CONTENT)
    open_folder.chmod(mode)
    assert child.start(lambda: find(NAME), without_rights=True).result() == "None"


def test_a_file_that_may_not_be_read(known_model: KnownModel, hub_cache: Path, open_folder: Path) -> None:
    (open_folder / FILE).write_bytes(CONTENT)
    (open_folder / FILE).chmod(0)
    told = child.start(lambda: check(NAME), without_rights=True).result()
    assert told.startswith("ModelFilesError") and "Permission denied" in told


def test_a_model_is_removed_wherever_it_lies(hub: FakeHub, models_folder: Path) -> None:
    cached = pull(NAME)
    models_folder.mkdir()
    (models_folder / FILE).write_bytes(CONTENT)
    assert remove(NAME) == 2 * len(CONTENT)
    assert find(NAME) is None and not cached.exists() and remove(NAME) == 0


FAULTS: dict[str, Callable[[Path], object]] = {
    "a folder": lambda path: path.mkdir(),
    "a link to itself": lambda path: path.symlink_to(path.name),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_no_file_is_not_found(hub: FakeHub, models_folder: Path, fault: str) -> None:
    models_folder.mkdir()
    FAULTS[fault](models_folder / FILE)
    assert find(NAME) is None and pull(NAME).read_bytes() == CONTENT

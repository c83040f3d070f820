"""Stamps, hashes and where files are kept."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from kvrecall.core.errors import ModelFilesError
from kvrecall.models import check, find, models_dir, pull, store
from tests.models.conftest import NAME, FakeIndex


def test_where_models_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVRECALL_MODELS", str(tmp_path / "chosen"))
    assert models_dir() == tmp_path / "chosen"
    monkeypatch.delenv("KVRECALL_MODELS")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert models_dir() == tmp_path / "kvrecall" / "models"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert models_dir() == tmp_path / ".cache" / "kvrecall" / "models"


def test_find_hashes_once_per_file(index: FakeIndex, models_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models_folder.mkdir()
    path = models_folder / "tiny.gguf"
    assert find(NAME) is None
    path.write_bytes(b"".join(index.parts))
    calls: list[Path] = []
    hash_file = store.sha256_of
    monkeypatch.setattr(store, "sha256_of", lambda p, *a: calls.append(p) or hash_file(p, *a))
    assert find(NAME) == path and find(NAME) == path and len(calls) == 1
    os.utime(path, ns=(1, 1))  # touched: the stamp no longer holds, the bytes do
    assert find(NAME) == path and len(calls) == 2


def test_changed_bytes_are_noticed_despite_the_stamp(index: FakeIndex) -> None:
    path = pull(NAME)
    path.write_bytes(b"y" * index.model.bytes)
    assert find(NAME) is None
    path.write_bytes(b"short")
    assert find(NAME) is None


def test_garbage_in_the_stamp_is_ignored(index: FakeIndex) -> None:
    path = pull(NAME)
    store.stamp_path(path).write_text("{", encoding="utf-8")
    assert find(NAME) == path


def test_check_ignores_the_stamp(index: FakeIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    path = pull(NAME)
    assert check(NAME) == path
    before = path.stat()
    path.write_bytes(b"z" * index.model.bytes)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert find(NAME) is None, "an edit that restores the time of modification"
    # A failing disk changes bytes and no times; only `check` finds that.
    stamp = json.loads(store.stamp_path(path).read_text(encoding="utf-8"))
    stamp.pop("sha256")
    monkeypatch.setattr(store, "identity", lambda _: stamp)
    assert find(NAME) == path
    with pytest.raises(ModelFilesError, match="expected " + index.model.sha256):
        check(NAME)
    assert find(NAME) is None


def test_check_of_a_missing_file_names_the_remedy(index: FakeIndex) -> None:
    with pytest.raises(ModelFilesError, match=f"kvrecall models pull {NAME}"):
        check(NAME)

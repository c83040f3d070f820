"""Every kind of `--model`, and every mistake with it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvrecall.core.errors import ModelFilesError, UnknownNameError
from kvrecall.models import KNOWN, resolve


@pytest.mark.parametrize("name", list(KNOWN))
def test_known_name(name: str) -> None:
    source = resolve(name)
    assert (source.kind, source.path) == ("known", None)


def test_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    source = resolve(tmp_path)
    assert (source.kind, source.path) == ("folder", tmp_path) and resolve(str(tmp_path)).kind == "folder"


def test_gguf_file_by_content_not_by_name(tmp_path: Path) -> None:
    path = tmp_path / "weights.bin"
    path.write_bytes(b"GGUF....")
    source = resolve(str(path))
    assert (source.kind, source.path) == ("gguf", path)


@pytest.mark.parametrize("spec", ["Qwen/Qwen2.5-0.5B-Instruct", "a/b", "org-1/name_2.x"])
def test_hub_repository(spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    source = resolve(spec)
    assert (source.kind, source.path) == ("hub", None)


def test_existing_folder_wins_over_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    os.makedirs("org/name")
    Path("org/name/config.json").write_text("{}", encoding="utf-8")
    assert resolve("org/name").kind == "folder"


def test_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(ModelFilesError, match=r"no config\.json"):
        resolve(str(tmp_path))


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04zip"])
def test_file_that_is_not_gguf(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelFilesError, match="not a GGUF file"):
        resolve(str(path))


@pytest.mark.parametrize("spec", ["missing.gguf", "./nowhere", "/no/such/place", "~/nothing-here", "a/b/c", Path("name")])
def test_path_that_does_not_exist(spec: str | Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelFilesError, match="no such file or folder"):
        resolve(spec)


def test_near_miss_is_suggested() -> None:
    with pytest.raises(UnknownNameError, match=r"Did you mean 'qwen2\.5-coder-0\.5b'"):
        resolve("qwen2.5-coder-0.5")

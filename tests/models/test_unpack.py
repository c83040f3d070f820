"""Unpacked copies: bounded, whole or not there, whatever kills, full disks, folders without rights and edits do."""

from __future__ import annotations

import os
import random
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import filelock  # before a child loses the right to read it
import pytest
import torch

from kvrecall.core.errors import ModelFilesError, ParameterError
from kvrecall.models import check, load, pull, store, unpack
from tests.models import child, hostile
from tests.models.conftest import NAME
from tests.models.fake_hub import FakeHub


def test_another_process_that_saves_is_not_waited_for(models_folder: Path, tmp_path: Path) -> None:
    gguf = hostile.tiny_gguf(tmp_path / "t.gguf")
    target = unpack.folder_of(gguf, torch.float32)
    target.parent.mkdir(parents=True)
    with filelock.FileLock(target.parent / ".lock"):
        assert load(gguf, dtype="float32", device="cpu")
    assert not target.exists()
    assert load(gguf, dtype="float32", device="cpu") and unpack.find_unpacked(gguf) == target


def test_a_folder_that_may_not_be_written_goes_without(open_folder: Path) -> None:
    gguf = hostile.tiny_gguf(open_folder.parent / "t.gguf")
    load(gguf, dtype="float32", device="cpu")
    shutil.rmtree(open_folder / "unpacked")
    open_folder.chmod(0o555)
    told = child.start(lambda: type(load(gguf, dtype="float32", device="cpu")[0]).__name__, without_rights=True).result()
    assert told == "LlamaForCausalLM" and not (open_folder / "unpacked").exists()


@pytest.mark.parametrize("limit", [0, 100, 400, 600, 5_000, 100_000, 150_000])
def test_a_disk_that_fills_up(tmp_path: Path, models_folder: Path, limit: int) -> None:
    """A write of any of the files fails in turn; the model is loaded all the same, and nothing half is kept."""
    gguf = hostile.tiny_gguf(tmp_path / "t.gguf")

    def weights() -> list[Any]:
        return [float(weight.sum()) for weight in load(gguf, dtype="float32", device="cpu")[0].state_dict().values()]

    told = child.start(weights, file_bytes=limit).result()
    assert unpack.find_unpacked(gguf) is None
    assert [p for p in (models_folder / "unpacked").iterdir() if p.name != ".lock"] == []
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
        self, hub: FakeHub, monkeypatch: pytest.MonkeyPatch, models_folder: Path
    ) -> None:
        path = pull(NAME)
        gguf = hostile.tiny_gguf(models_folder.parent / "t.gguf")
        load(gguf, dtype="float32", device="cpu")
        (copy,) = unpack.copies(gguf.stem)
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

    def test_what_a_killed_save_left_is_removed(self, gguf: Path, copy: Path) -> None:
        left = copy.parent / ".saving-x"
        left.mkdir()
        shutil.rmtree(copy)
        load(gguf, dtype="float32", device="cpu")
        assert not left.exists() and unpack.find_unpacked(gguf) == copy

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
            assert [p.name for p in found.parent.iterdir() if p.name != ".lock"] == [found.name]


class TestBound:
    """All copies together take no more than KVRECALL_UNPACK_LIMIT; what happens is told."""

    @pytest.fixture
    def told(self) -> list[str]:
        return []

    @pytest.fixture
    def keep(self, tmp_path: Path, models_folder: Path, told: list[str]) -> Callable[[str], Path]:
        """Loads a file of this name, so that a copy is kept; returns the file."""

        def run(name: str) -> Path:
            gguf = tmp_path / f"{name}.gguf"
            if not gguf.exists():
                hostile.tiny_gguf(gguf)
            load(gguf, dtype="float32", device="cpu", on_notice=told.append)
            return gguf

        return run

    def names(self) -> list[str]:
        return [folder.name[:1] for folder in unpack.copies()]

    def test_the_least_recently_used_goes_first(
        self, keep: Callable[[str], Path], told: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        keep("a")
        assert told.pop().startswith("Kept an unpacked copy of a.gguf, 0.0 GiB") and not told
        one = sum(map(unpack.bytes_of, unpack.copies()))
        monkeypatch.setenv("KVRECALL_UNPACK_LIMIT", str(one * 5 // 2))
        keep("b"), keep("a")
        assert self.names() == ["b", "a"] and len(told) == 1
        keep("c")
        assert self.names() == ["a", "c"] and "1 that was not used for longest had to go" in told[-1]
        assert sum(map(unpack.bytes_of, unpack.copies())) <= unpack.limit_bytes()

    def test_a_copy_that_alone_is_too_large_is_not_kept(
        self, keep: Callable[[str], Path], told: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        keep("a")
        monkeypatch.setenv("KVRECALL_UNPACK_LIMIT", "1k")
        keep("b")
        assert self.names() == ["a"] and "b.gguf is not kept" in told[-1] and "KVRECALL_UNPACK_LIMIT" in told[-1]

    def test_turned_off_nothing_is_kept_and_nothing_told(
        self, keep: Callable[[str], Path], told: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("KVRECALL_UNPACK", "0")
        keep("a")
        assert self.names() == [] and told == [] and unpack.limit_bytes() == 0

    def test_a_limit_that_is_no_number_is_told_before_anything_is_read(
        self, keep: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("KVRECALL_UNPACK_LIMIT", "much")
        monkeypatch.setattr(sys.modules[load.__module__], "gguf_config", lambda *_: pytest.fail("read"))
        with pytest.raises(ParameterError, match="KVRECALL_UNPACK_LIMIT: expected bytes such as 500m"):
            keep("a")


def _flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0xFF
    path.write_bytes(data)

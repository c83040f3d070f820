"""Unpacked copies: whole or not there, whatever kills, full disks, folders without rights and edits do."""

from __future__ import annotations

import os
import random
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import filelock  # before a child loses the right to read it
import pytest
import torch

from kvrecall.models import load
from kvrecall.models.files import sha256_of
from kvrecall.models.unpacked import COMPLETE, copies, folder_of, is_complete
from tests.models import child, hostile


@pytest.fixture
def gguf(tmp_path: Path, models_folder: Path) -> Path:
    return hostile.tiny_gguf(tmp_path / "t.gguf")


@pytest.fixture
def copy(gguf: Path) -> Path:
    load(gguf, dtype="float32", device="cpu")
    found = folder_of(gguf, sha256_of(gguf), torch.float32)
    assert is_complete(found) and copies() == [found]
    return found


def weights(path: Path) -> list[float]:
    return [float(weight.sum()) for weight in load(path, dtype="float32", device="cpu")[0].state_dict().values()]


def test_second_load_reads_the_copy(gguf: Path, copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVRECALL_UNPACK", "0")
    expected = weights(gguf)
    monkeypatch.delenv("KVRECALL_UNPACK")
    monkeypatch.setattr(sys.modules[load.__module__], "gguf_config", lambda *_: pytest.fail("read"))
    assert weights(gguf) == expected


def test_each_file_and_dtype_has_a_copy_of_its_own(gguf: Path, copy: Path) -> None:
    """A file that changed replaces the copy of that name."""
    load(gguf, dtype="bfloat16", device="cpu")
    assert len(copies()) == 2 and is_complete(copy)
    gguf.write_bytes(gguf.read_bytes() + b"\0")
    load(gguf, dtype="float32", device="cpu")
    assert len(copies()) == 2 and not copy.exists()


def test_notices(gguf: Path, models_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notices: list[str] = []
    monkeypatch.setenv("KVRECALL_UNPACK", "0")
    load(gguf, dtype="float32", device="cpu", on_notice=notices.append)
    assert notices == [] and copies() == []
    monkeypatch.delenv("KVRECALL_UNPACK")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(9, 9, 0))  # type: ignore[attr-defined]
        load(gguf, dtype="float32", device="cpu", on_notice=notices.append)
        assert "is not kept (OSError: the disk has little room)" in notices.pop() and copies() == []
    load(gguf, dtype="float32", device="cpu", on_notice=notices.append)
    assert notices.pop().startswith(f"Kept {copies()[0]} to load faster")
    load(gguf, dtype="float32", device="cpu", on_notice=notices.append)
    assert not notices


def test_another_process_that_saves_is_not_waited_for(gguf: Path, models_folder: Path) -> None:
    (models_folder / "unpacked").mkdir(parents=True)
    with filelock.FileLock(models_folder / "unpacked" / ".lock"):
        load(gguf, dtype="float32", device="cpu")
    assert copies() == []
    load(gguf, dtype="float32", device="cpu")
    assert len(copies()) == 1


def test_a_folder_that_may_not_be_written_goes_without(open_folder: Path) -> None:
    gguf = hostile.tiny_gguf(open_folder.parent / "t.gguf")
    load(gguf, dtype="float32", device="cpu")
    shutil.rmtree(open_folder / "unpacked")
    open_folder.chmod(0o555)
    told = child.start(lambda: type(load(gguf, dtype="float32", device="cpu")[0]).__name__, without_rights=True).result()
    assert told == "LlamaForCausalLM" and not (open_folder / "unpacked").exists()


@pytest.mark.parametrize("limit", [0, 100, 400, 600, 5_000, 100_000, 150_000])
def test_a_disk_that_fills_up(gguf: Path, models_folder: Path, limit: int) -> None:
    """A write of any of the files fails in turn; the model is loaded all the same, and nothing half is kept."""
    told = child.start(lambda: weights(gguf), file_bytes=limit).result()
    assert [p for p in (models_folder / "unpacked").iterdir() if p.name != ".lock"] == []
    assert told == str(weights(gguf)) and len(copies()) == 1


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "one bit of the weights": lambda folder: _flip(folder / "model.safetensors", -1000),
    "weights cut": lambda folder: os.truncate(folder / "model.safetensors", 1000),
    "weights empty": lambda folder: os.truncate(folder / "model.safetensors", 0),
    "weights gone": lambda folder: (folder / "model.safetensors").unlink(),
    "tokenizer": lambda folder: _flip(folder / "tokenizer.json", 100),
    "config": lambda folder: (folder / "config.json").write_text("{}", encoding="utf-8"),
    "generation config": lambda folder: (folder / "generation_config.json").unlink(),
    "a file more": lambda folder: (folder / "adapter_config.json").write_text("{}", encoding="utf-8"),
    "a folder more": lambda folder: (folder / "more").mkdir(),
    "mark gone": lambda folder: (folder / COMPLETE).unlink(),
    "mark cut": lambda folder: os.truncate(folder / COMPLETE, 20),
    "mark is a list": lambda folder: (folder / COMPLETE).write_text("[]", encoding="utf-8"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_copy_is_made_anew(gguf: Path, copy: Path, damage: str) -> None:
    before = {path.name: path.read_bytes() for path in copy.iterdir() if path.name != COMPLETE}
    DAMAGES[damage](copy)
    assert not is_complete(copy)
    model, tokenizer = load(gguf, dtype="float32", device="cpu")
    assert len(model.model.layers) == 1 and tokenizer("ab").input_ids == [13]
    assert is_complete(copy)
    assert {path.name: path.read_bytes() for path in copy.iterdir() if path.name != COMPLETE} == before


def test_kills_while_unpacking(gguf: Path, models_folder: Path) -> None:
    load(gguf, dtype="float32", device="cpu")
    rng = random.Random(1)
    for _ in range(12):
        shutil.rmtree(models_folder / "unpacked")
        process = child.start(lambda: load(gguf, dtype="float32", device="cpu"))
        time.sleep(rng.uniform(0, 0.12))
        process.kill()
        model, _ = load(gguf, dtype="float32", device="cpu")
        (found,) = copies()
        assert is_complete(found) and len(model.model.layers) == 1
        assert [p.name for p in found.parent.iterdir() if p.name != ".lock"] == [found.name]


def _flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0xFF
    path.write_bytes(data)

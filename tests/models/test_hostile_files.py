"""Damaged and hostile model files: a clear error within seconds and bounded memory, never a model of random weights."""

from __future__ import annotations

import json
import os
import resource
import shutil
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvrecall.core.errors import KVRecallError, ModelFilesError, UnknownNameError
from kvrecall.models import load, load_config, resolve
from kvrecall.models.gguf import FormatError, read_header
from tests.models import hostile
from tests.models.hostile import Edit
from tests.tiny import save_tiny_model

LIMIT_SECONDS = 15.0
LIMIT_BYTES = 400 << 20


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder and a GGUF file that load."""
    place = tmp_path_factory.mktemp("sound")
    save_tiny_model(place / "folder")
    hostile.tiny_gguf(place / "tiny.gguf")
    return place


@pytest.fixture(autouse=True)
def within_bounds(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No case takes long or much memory; nothing is kept."""
    monkeypatch.setenv("KVRECALL_UNPACK", "0")
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    yield
    assert time.process_time() - start < LIMIT_SECONDS
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < LIMIT_BYTES >> 10


def refused(spec: Path) -> str:
    with pytest.raises(KVRecallError) as caught:
        load(spec, dtype="float32", device="cpu")
    assert isinstance(caught.value, ModelFilesError)
    return str(caught.value)


def refused_after(edit: Edit, folder: Path, copy: Path) -> str:
    shutil.copytree(folder, copy)
    edit(copy)
    return refused(copy)


def test_the_sound_ones_load(sound: Path) -> None:
    for spec, word in ((sound / "folder", "red"), (sound / "tiny.gguf", "ab")):
        model, tokenizer = load(spec, dtype="float32", device="cpu")
        assert all(torch.isfinite(weight).all() for weight in model.state_dict().values())
        assert tokenizer(word, add_special_tokens=False).input_ids[-1] > 0
        assert load_config(spec).num_hidden_layers == 1
    assert read_header(sound / "tiny.gguf").values["general.name"] == "tiny"


def test_bad_gguf(sound: Path, tmp_path: Path) -> None:
    cases = hostile.bad_gguf((sound / "tiny.gguf").read_bytes())
    assert len(cases) > 60
    for name, data in cases.items():
        path = tmp_path / "bad.gguf"
        path.write_bytes(data)
        start = time.process_time()
        assert "bad.gguf" in refused(path), name
        assert time.process_time() - start < 2, name


@pytest.mark.parametrize("kind", [0, 8], ids=["numbers", "texts"])
def test_claims_of_a_file_with_holes_are_not_followed(tmp_path: Path, kind: int) -> None:
    """A file may be a terabyte long and take no room: a reader would walk 2^37 elements of zeros."""
    path = tmp_path / "holes.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQQ", 3, 1, 1, 1) + b"a" + struct.pack("<IIQ", 9, kind, 2**37))
    os.truncate(path, 1 << 40)
    with pytest.raises(FormatError):
        read_header(path)
    refused(path)


@pytest.mark.parametrize("alignment", [0, 3, 2**31 + 1])
def test_alignment_of_a_gguf_is_a_power_of_two(tmp_path: Path, alignment: int) -> None:
    from gguf import GGUFWriter

    path = tmp_path / "a.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_uint32("general.alignment", alignment)
    writer.add_tensor("x", torch.zeros(32).numpy())
    writer.data_alignment = 32
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(FormatError, match="power of two"):
        read_header(path)


def test_bad_safetensors(sound: Path, tmp_path: Path) -> None:
    data = (sound / "folder" / "model.safetensors").read_bytes()
    for number, (name, bad) in enumerate(hostile.bad_safetensors(data).items()):
        told = refused_after(
            lambda c, bad=bad: (c / "model.safetensors").write_bytes(bad), sound / "folder", tmp_path / str(number)
        )
        assert "could not be loaded" in told, name


@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"])
def test_settings_that_are_no_objects(sound: Path, tmp_path: Path, file: str) -> None:
    for number, (name, bad) in enumerate(hostile.NOT_OBJECTS.items()):
        told = refused_after(lambda c, bad=bad: (c / file).write_bytes(bad), sound / "folder", tmp_path / str(number))
        assert "could not be loaded" in told, name
        if file == "config.json":
            with pytest.raises(ModelFilesError, match="config could not be read"):
                load_config(tmp_path / str(number))


@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "tokenizer_config.json", "model.safetensors"])
@pytest.mark.parametrize("what", ["folder", "link to itself"])
def test_files_that_are_none(sound: Path, tmp_path: Path, file: str, what: str) -> None:
    def edit(copy: Path) -> None:
        (copy / file).unlink()
        (copy / file).mkdir() if what == "folder" else (copy / file).symlink_to(file)

    refused_after(edit, sound / "folder", tmp_path / "copy")


def test_pipes_are_not_waited_for(sound: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors", "tokenizer.json"):

        def edit(copy: Path, name: str = name) -> None:
            (copy / name).unlink()
            os.mkfifo(copy / name)

        refused_after(edit, sound / "folder", tmp_path / name)
    os.mkfifo(tmp_path / "m.gguf")
    refused(tmp_path / "m.gguf")


def test_absurd_configs(sound: Path, tmp_path: Path) -> None:
    for number, (name, edit) in enumerate(hostile.config_edits(sound / "folder").items()):
        start = time.process_time()
        told = refused_after(edit, sound / "folder", tmp_path / str(number))
        assert "could not be loaded" in told and time.process_time() - start < 5, name


def test_weights_that_do_not_fit_the_config(sound: Path, tmp_path: Path) -> None:
    told = {}
    for number, (name, edit) in enumerate(hostile.weight_edits(sound / "folder").items()):
        told[name] = refused_after(edit, sound / "folder", tmp_path / str(number))
    assert (
        "lack 1 weights, which would be random numbers: model.layers.0.self_attn.q_proj.weight" in told["a weight is missing"]
    )
    assert "weights of layer 1" in told["a layer too many"]
    assert "what is no file of the same folder" in told["index names a file of another folder"]


def test_code_in_a_model_folder_is_neither_run_nor_asked_about(sound: Path, tmp_path: Path) -> None:
    def edit(copy: Path) -> None:
        config = json.loads((copy / "config.json").read_text(encoding="utf-8"))
        config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}}
        (copy / "config.json").write_text(json.dumps(config), encoding="utf-8")
        (copy / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')", encoding="utf-8")

    refused_after(edit, sound / "folder", tmp_path / "copy")
    with pytest.raises(ModelFilesError):
        load_config(tmp_path / "copy")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("spec", ["x" * 5000, "/" + "x" * 5000, "~nobody-of-this-name/m", "a\0b", "/dev/zero", "/dev/null", ""])
def test_names_that_no_file_can_have(spec: str) -> None:
    with pytest.raises((ModelFilesError, UnknownNameError)):
        resolve(spec)


def test_memory_that_does_not_suffice_is_told(sound: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    def full(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", full)
    assert "does not fit in memory" in refused(sound / "folder")

"""Loading from folders and GGUF files; configs without weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvrecall.backends.transformers.families import context_limit
from kvrecall.core.errors import ModelFilesError, ParameterError
from kvrecall.models import KNOWN, as_device, as_dtype, default_dtype, load, load_config
from tests.tiny import save_tiny_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny model as `save_pretrained` writes it."""
    return save_tiny_model(tmp_path / "m")


def test_folder_loads_in_eval_mode_and_leaves_settings_alone(folder: Path) -> None:
    from transformers.utils import logging

    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    model, tokenizer = load(folder, dtype="float32", device="cpu")
    assert not model.training and model.dtype == torch.float32
    assert tokenizer("the red boat", add_special_tokens=False)["input_ids"] == [5, 6, 7]
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before


def test_default_dtype_is_used(folder: Path) -> None:
    assert load(folder, device="cpu")[0].dtype == default_dtype(torch.device("cpu"))


def test_folder_with_missing_parts_is_named(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelFilesError, match="could not be loaded"):
        load(folder)


def test_damaged_gguf_is_named(tmp_path: Path, models_folder: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + bytes(64))
    with pytest.raises(ModelFilesError, match="could not be read as GGUF"):
        load(path)
    with pytest.raises(ModelFilesError, match="config could not be read"):
        load_config(path)


def test_gguf_packages_are_named_when_missing(tmp_path: Path, models_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelFilesError, match=r'pip install "\.\[demo\]"'):
        load(tmp_path / "m.gguf")


@pytest.mark.parametrize("value", ["int8", "bf32", "", torch.int32])
def test_bad_dtype(value: Any) -> None:
    with pytest.raises(ParameterError, match="dtype: expected bfloat16"):
        as_dtype(value)


def test_dtype_names() -> None:
    assert as_dtype("BF16") == as_dtype("torch.bfloat16") == as_dtype(torch.bfloat16) == torch.bfloat16


@pytest.mark.parametrize("value", ["gpu", "cuda:99", "cpu:x"])
def test_bad_device(value: str) -> None:
    with pytest.raises(ParameterError, match="device: expected cpu"):
        as_device(value)


@pytest.mark.parametrize("name", list(KNOWN))
def test_configs_of_known_models_need_no_files(name: str, models_folder: Path) -> None:
    config = load_config(name)
    assert config.num_hidden_layers in (24, 28, 30) and config.max_position_embeddings >= 8192
    assert not models_folder.exists()


def test_a_long_context_changes_the_rotary_embedding_alone(models_folder: Path) -> None:
    long, plain = (load_config(f"qwen2.5-coder-0.5b{end}").to_dict() for end in ("-128k", ""))
    assert context_limit(load_config("qwen2.5-coder-0.5b-128k")) == 131072 == 4 * plain["max_position_embeddings"]
    rotary = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    assert long.pop("rope_parameters") == plain.pop("rope_parameters") | rotary
    assert long == plain


@pytest.mark.model
def test_a_copy_of_the_weights_has_no_say_in_a_known_models_config(
    smollm2: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    long = replace(KNOWN["smollm2-135m"], name="smollm2-135m-long", yarn=2)
    monkeypatch.setitem(KNOWN, long.name, long)
    extended, plain = (load(name, dtype=torch.float32, device="cpu")[0] for name in (long.name, "smollm2-135m"))
    assert extended.config.rope_parameters["factor"] == 2 and plain.config.rope_parameters["rope_type"] == "default"
    assert torch.equal(extended.model.embed_tokens.weight, plain.model.embed_tokens.weight)


@pytest.mark.model
def test_dequantised_and_unpacked_smollm2_agree(
    smollm2: tuple[Any, Any], smollm2_was_unpacked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever of both the other tests have, this one loads the other, if the disk had room for it."""
    if smollm2_was_unpacked:
        monkeypatch.setenv("KVRECALL_UNPACK", "0")
    model, tokenizer = smollm2
    fresh, fresh_tokenizer = load("smollm2-135m", dtype=torch.float32, device="cpu")
    text = "The harbour of Averness <|im_end|> 漢字"
    assert tokenizer(text)["input_ids"] == fresh_tokenizer(text)["input_ids"]
    assert model.state_dict().keys() == fresh.state_dict().keys()
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), fresh.state_dict().values(), strict=True))
    assert model.generation_config.eos_token_id == fresh.generation_config.eos_token_id == tokenizer.eos_token_id

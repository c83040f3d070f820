"""Files of key statistics: what was gathered comes back bit for bit, and anything else is refused by name."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvrecall.backends.transformers import RetrievalCache
from kvrecall.backends.transformers import calibration_file as files
from kvrecall.backends.transformers.calibration import ModelCalibration, calibration_of, describe, forget, fresh, load
from kvrecall.backends.transformers.fingerprint import Fingerprint, fingerprint_of
from kvrecall.core.errors import CalibrationError, OutputFileError
from kvrecall.engine.prefill import prefill
from kvrecall.index.calibration import KeyStatistics
from kvrecall.methods.full import Full
from tests.backends.models import tiny
from tests.backends.test_calibration import balanced, ids_of

DEEP = "[" * 100_000 + "]" * 100_000


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVRECALL_MODELS", str(tmp_path / "models"))
    return tmp_path / "calibration"


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("llama")


def gathered(model: Any, tokens: int = 200) -> ModelCalibration:
    cache = RetrievalCache(model.config, Full())
    cache.calibration = fresh(model)
    prefill(model, ids_of(tokens), cache)
    return cache.calibration


@pytest.fixture
def path(model: Any, tmp_path: Path) -> Path:
    held = describe(model, gathered(model), "m", "a text")
    files.write(tmp_path / "made" / "f.safetensors", held)
    return tmp_path / "made" / "f.safetensors"


def equal(one: KeyStatistics, other: KeyStatistics) -> bool:
    return one.tokens == other.tokens and all(
        torch.equal(getattr(one, name), getattr(other, name)) and getattr(one, name).dtype == torch.float64
        for name in ("key_mean", "key_covariance", "query_second")
    )


def test_bit_for_bit(model: Any, tmp_path: Path) -> None:
    before = gathered(model)
    files.write(tmp_path / "f", describe(model, before, "m", "a text"))
    after = load(model, tmp_path / "f")
    assert after.settled
    for number, statistics in before.settle().items():
        assert statistics.tokens == 200 and equal(statistics, after.settle()[number])


def test_found_by_fingerprint(model: Any, folder: Path) -> None:
    held = describe(model, gathered(model), "m", "a text")
    target = files.path_for(held.fingerprint)
    assert target.parent == folder
    files.write(target, held)
    forget(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = calibration_of(model)
        assert found is not None and found.settled and calibration_of(model) is found
        cache = RetrievalCache(model.config, balanced())
        prefill(model, ids_of(50), cache)
    assert cache.calibration is found and equal(found.settle()[1], held.statistics[1])
    forget(model)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32], ids=str)
def test_a_model_has_one_fingerprint_in_every_dtype(stored: torch.dtype) -> None:
    """Weights in bfloat16 are the same numbers in every dtype; those in float32 are rounded to bfloat16 first."""
    expected = fingerprint_of(tiny("llama").to(stored))
    dtypes = [torch.bfloat16, torch.float32, *([torch.float16] if stored == torch.bfloat16 else [])]
    assert {fingerprint_of(tiny("llama").to(stored).to(dtype)) for dtype in dtypes} == {expected}


def test_other_models_have_others() -> None:
    model = tiny("llama")
    own = fingerprint_of(model)
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight.mul_(1.1)
    changed = fingerprint_of(model)
    assert own.config == changed.config and own.weights != changed.weights and not own.fits(changed)
    scaled = fingerprint_of(tiny("llama", rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}))
    assert scaled.config != own.config and not scaled.fits(own)


def test_weights_that_cannot_be_read_are_left_out() -> None:
    model = tiny("llama")
    own = fingerprint_of(model)
    hidden = fingerprint_of(model.to("meta"))
    assert hidden.weights is None and hidden.fits(own)


def test_without_weights_the_only_file_that_fits_is_found(folder: Path, model: Any) -> None:
    held = describe(model, gathered(model), "m", "")
    files.write(files.path_for(held.fingerprint), held)
    hidden = Fingerprint(held.fingerprint.config, None)
    assert files.find(hidden) == files.path_for(held.fingerprint)
    files.path_for(Fingerprint(hidden.config, "f" * 64)).write_bytes(b"")
    assert files.find(hidden) is None


def test_the_file_of_another_model(path: Path) -> None:
    other = tiny("llama", rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    with pytest.raises(CalibrationError, match=r"expected statistics of this model, got those of another one \(m\)"):
        load(other, path)


def rewritten(path: Path, told: Any = None, **changes: torch.Tensor | None) -> Path:
    """The file with other metadata (a dict of changes, or text) or tensors; None removes one."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        held = json.loads(file.metadata()["kvrecall-calibration"])
    tensors = {name: tensor for name, tensor in {**load_file(path), **changes}.items() if tensor is not None}
    text = told if isinstance(told, str) else json.dumps(held | (told or {}))
    target = path.with_name("other")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target, metadata={"kvrecall-calibration": text})
    return target


@pytest.mark.parametrize(
    "told, said",
    [
        ({"version": 2}, "expected version 1 of the format, got version 2. Use a newer kvrecall"),
        ({"version": 99, "something": [1]}, "got version 99"),
        ({"version": 0}, "version"),
        ({"version": "1"}, "version"),
        ({"version": True}, "version"),
        ({"tokens": 0}, "tokens"),
        ({"tokens": 1e3}, "tokens"),
        ({"model": None}, "model"),
        ({"config": "../../x"}, "config"),
        ({"weights": "0"}, "weights"),
        ({"more": 1}, "more: extra inputs"),
        ("", "another one"),
        ("{", "another one"),
        ("7", "another one"),
        (DEEP, "nested too deeply"),
        ('{"version": 1, "tokens": NaN}', "NaN"),
        ('{"version": 1, "text": "' + "x" * 2**20 + '"}', "characters"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_metadata_of_anybody(model: Any, path: Path, told: Any, said: str) -> None:
    with pytest.raises(CalibrationError, match=said):
        load(model, rewritten(path, told))


MEAN, SECOND = "layer.1.key_mean", "layer.1.key_covariance"


@pytest.mark.parametrize(
    "changes, said",
    [
        ({MEAN: None}, "expected tensors of layers 0, 1, 2"),
        ({"layer.9.key_mean": torch.zeros(2, 64)}, "expected tensors of layers"),
        ({MEAN: torch.zeros(4, 64)}, r"key_mean: expected F32 of shape \[2, 64\], got F32 of \[4, 64\]"),
        ({MEAN: torch.zeros(2, 64, dtype=torch.float64)}, "expected F32"),
        ({SECOND: torch.zeros(2, 64)}, "expected F32 of shape"),
        ({MEAN: torch.full((2, 64), float("nan"))}, "layer 1: key_mean contains NaN"),
        ({SECOND: torch.full((2, 64, 64), float("inf"))}, "contains NaN or infinity"),
        ({SECOND: -torch.eye(64).expand(2, 64, 64)}, "key_covariance is no"),
        (
            {SECOND: torch.eye(64).expand(2, 64, 64) + 2 * torch.ones(64, 64).triu(1)},
            "key_covariance is no",
        ),
    ],
    ids=str,
)
def test_tensors_of_anybody(model: Any, path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(CalibrationError, match=said):
        load(model, rewritten(path, **changes))


def test_cut_off_at_any_place(model: Any, path: Path) -> None:
    data = path.read_bytes()
    for length in (0, 1, 7, 8, 100, 2000, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:length])
        with pytest.raises(CalibrationError, match="expected a file of key statistics"):
            load(model, path)


def test_no_file_at_all(model: Any, tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(CalibrationError, match="no such file"):
            load(model, place)


def test_a_header_that_promises_terabytes(model: Any, tmp_path: Path) -> None:
    header = json.dumps({MEAN: {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}).encode()
    (tmp_path / "f").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(CalibrationError, match="expected a file of key statistics"):
        load(model, tmp_path / "f")


def test_a_damaged_file_in_the_folder_is_told_and_not_used(folder: Path) -> None:
    model = tiny("llama")
    place = files.path_for(fingerprint_of(model))
    place.parent.mkdir(parents=True)
    place.write_bytes(b"nothing")
    with pytest.warns(UserWarning, match="a file of key statistics.*Until then, statistics come from the first prompt"):
        found = calibration_of(model)
    assert found is not None and not found.settled


def test_a_place_that_cannot_be_written(model: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputFileError, match="cannot be written"):
        files.write(tmp_path / "file" / "f", describe(model, gathered(model), "m", ""))


def test_statistics_of_nothing_are_not_written(model: Any) -> None:
    with pytest.raises(CalibrationError, match="NaN or infinity"):
        describe(model, fresh(model), "m", "")


def test_a_process_of_several_takes_its_heads(model: Any, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    from kvrecall.backends.transformers import calibration as module

    whole = load(model, path).settle()
    rotaries = module.rotaries_of(model)
    mine = replace(rotaries, layers={n: replace(layer, kv_heads=1) for n, layer in rotaries.layers.items()})
    monkeypatch.setattr(module, "rotaries_of", lambda model: mine)
    monkeypatch.setattr(module, "_world", lambda: 2)
    monkeypatch.setattr(module.dist, "get_rank", lambda: 1)
    part = load(model, path)
    for number, statistics in part.settle().items():
        assert torch.equal(statistics.key_covariance, whole[number].key_covariance[1:])
    assert part.layer(0, 1, 64) is not None and part.layer(0, 2, 64) is None
    monkeypatch.setattr(module, "_world", lambda: 3)
    with pytest.raises(CalibrationError, match="share the KV heads evenly"):
        load(model, path)

"""Files of key statistics: what was gathered comes back bit for bit, and anything else is refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvrecall.backends.transformers import statistics_file as files
from kvrecall.backends.transformers.fingerprint import Fingerprint, fingerprint_of
from kvrecall.backends.transformers.rotary import rotaries_of
from kvrecall.backends.transformers.statistics import Source, observed, statistics_of
from kvrecall.backends.transformers.statistics_file import StatisticsFile
from kvrecall.core.errors import OutputFileError, StatisticsError
from kvrecall.index.statistics import KeyStatistics
from tests.backends.models import tiny

DEEP = "[" * 100_000 + "]" * 100_000


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVRECALL_MODELS", str(tmp_path / "models"))
    return tmp_path / "statistics"


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("llama")


@pytest.fixture(scope="module")
def held(model: Any) -> StatisticsFile:
    source = Source.of(model.config, None)
    found = observed(model, source.ids, rotaries_of(model))
    return StatisticsFile(fingerprint_of(model), "m", len(source.ids), len(set(source.ids)), "a text", found)


@pytest.fixture
def path(held: StatisticsFile, tmp_path: Path) -> Path:
    files.write(tmp_path / "made" / "f.safetensors", held)
    return tmp_path / "made" / "f.safetensors"


def load(model: Any, path: Path) -> StatisticsFile:
    layers = {number: (layer.kv_heads, layer.dim) for number, layer in rotaries_of(model).layers.items()}
    return files.read(path, fingerprint_of(model), layers, model.config)


def equal(one: KeyStatistics, other: KeyStatistics) -> bool:
    return one.tokens == other.tokens and all(
        torch.equal(getattr(one, name), getattr(other, name)) and getattr(one, name).dtype == torch.float64
        for name in ("key_mean", "key_covariance", "query_second")
    )


def test_bit_for_bit(model: Any, held: StatisticsFile, path: Path) -> None:
    after = load(model, path)
    assert (after.tokens, after.different, after.text) == (held.tokens, held.different, "a text")
    assert all(equal(statistics, after.statistics[number]) for number, statistics in held.statistics.items())


def test_a_user_s_own_text_comes_first(held: StatisticsFile) -> None:
    own = tiny("llama")
    with pytest.warns(UserWarning, match="computed statistics"):
        before = statistics_of(own)
    doubled = {n: replace(x, key_mean=2 * x.key_mean) for n, x in held.statistics.items()}
    target = files.path_for(held.fingerprint, files.OWN_TEXT)
    assert target is not None and files.own_text(held.fingerprint) is None
    files.write(target, replace(held, statistics=doubled))
    found = statistics_of(own)
    assert equal(found.layers[1].keys, doubled[1]) and statistics_of(own) is found
    target.unlink()
    assert statistics_of(own) is before


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


def test_without_weights_there_is_no_file() -> None:
    assert files.path_for(Fingerprint("0" * 64, None), "x") is None and files.own_text(Fingerprint("0" * 64, None)) is None


def test_the_file_of_another_model(path: Path) -> None:
    other = tiny("llama", rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    with pytest.raises(StatisticsError, match=r"expected statistics of this model, got those of another one \(m\)"):
        load(other, path)


def rewritten(path: Path, told: Any = None, **changes: torch.Tensor | None) -> Path:
    """The file with other metadata (a dict of changes, or text) or tensors; None removes one."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        held = json.loads(file.metadata()["kvrecall-statistics"])
    tensors = {name: tensor for name, tensor in {**load_file(path), **changes}.items() if tensor is not None}
    text = told if isinstance(told, str) else json.dumps(held | (told or {}))
    target = path.with_name("other")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target, metadata={"kvrecall-statistics": text})
    return target


@pytest.mark.parametrize(
    "told, said",
    [
        ({"version": 3}, "expected version 2 of the format, got version 3. Use a newer kvrecall"),
        ({"version": 99, "something": [1]}, "got version 99"),
        ({"version": 0}, "version"),
        ({"version": "1"}, "version"),
        ({"version": True}, "version"),
        ({"tokens": 0}, "tokens"),
        ({"tokens": 1e3}, "tokens"),
        ({"different": 0}, "different"),
        ({"different": 12}, "12 different tokens where 128 are needed"),
        ({"model": None}, "model"),
        ({"config": "../../x"}, "config"),
        ({"weights": "0"}, "weights"),
        ({"more": 1}, "more: extra inputs"),
        ("", "another one"),
        ("{", "another one"),
        ("7", "another one"),
        (DEEP, "nested too deeply"),
        ('{"version": 2, "tokens": NaN}', "NaN"),
        ('{"version": 2, "text": "' + "x" * 2**20 + '"}', "characters"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_metadata_of_anybody(model: Any, path: Path, told: Any, said: str) -> None:
    with pytest.raises(StatisticsError, match=said):
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
    with pytest.raises(StatisticsError, match=said):
        load(model, rewritten(path, **changes))


def test_cut_off_at_any_place(model: Any, path: Path) -> None:
    data = path.read_bytes()
    for length in (0, 1, 7, 8, 100, 2000, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:length])
        with pytest.raises(StatisticsError, match="expected a file of key statistics"):
            load(model, path)


def test_no_file_at_all(model: Any, tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(StatisticsError, match="no such file"):
            load(model, place)


def test_a_header_that_promises_terabytes(model: Any, tmp_path: Path) -> None:
    header = json.dumps({MEAN: {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}).encode()
    (tmp_path / "f").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(StatisticsError, match="expected a file of key statistics"):
        load(model, tmp_path / "f")


def test_a_file_of_repeated_tokens_is_refused(model: Any, path: Path) -> None:
    few = torch.zeros(2, 64, 64)
    few[:, 3, 3] = 1.0
    with pytest.raises(StatisticsError, match="keys of layer 1 in 1 of 64 directions"):
        load(model, rewritten(path, **{SECOND: few}))


def test_a_damaged_file_in_the_folder_is_told_and_replaced(held: StatisticsFile, folder: Path) -> None:
    own = tiny("llama")
    place = files.path_for(held.fingerprint, Source.of(own.config, None).digest)
    assert place is not None
    place.parent.mkdir(parents=True)
    place.write_bytes(b"nothing")
    with pytest.warns(UserWarning, match="a file of key statistics.*They are computed anew"):
        found = statistics_of(own)
    assert equal(load(own, place).statistics[1], found.layers[1].keys)


def test_a_place_that_cannot_be_written(held: StatisticsFile, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputFileError, match="cannot be written"):
        files.write(tmp_path / "file" / "f", held)

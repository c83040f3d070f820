"""A trace keeps what was known of its keys, so that a method is replayed as it was in the model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import kvrecall
from kvrecall.backends.transformers.rotary import rotaries_of
from kvrecall.core.errors import InputFileError
from kvrecall.evaluate.recall import prepared, replay
from kvrecall.evaluate.trace import Trace, capture
from tests.backends.models import tiny

ZONES: dict[str, Any] = {"sink_tokens": 4, "local_tokens": 32, "update_interval": 16}


@pytest.fixture
def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trace:
    monkeypatch.setenv("KVRECALL_MODELS", str(tmp_path / "models"))
    ids = torch.randint(3, 300, (1, 200), generator=torch.Generator().manual_seed(0))
    with pytest.warns(UserWarning, match="computed statistics"):
        return capture(tiny("llama"), ids, steps=5, layers=(0, 2), observe_queries=64, chunk_tokens=64)


def test_kept_and_read_again(trace: Trace, tmp_path: Path) -> None:
    trace.save(tmp_path / "t")
    again = Trace.load(tmp_path / "t")
    for number, layer in trace.layers.items():
        one, other = layer.statistics, again.layers[number].statistics
        assert one is not None and other is not None
        for (cos, sin), (c, s) in [(one.rotary.cos_sin(0, 204), other.rotary.cos_sin(0, 204))]:
            assert torch.equal(cos, c) and torch.equal(sin, s)
        before, after = one.keys, other.keys
        assert before.tokens == after.tokens == 1024
        for name in ("key_mean", "key_covariance", "query_second"):
            assert torch.equal(getattr(before, name), getattr(after, name))
    first, last = (again.layers[n].statistics for n in (0, 2))
    assert first is not None and last is not None and first.rotary is last.rotary


def test_the_table_is_the_model_s_embedding(trace: Trace) -> None:
    layer = trace.layers[2]
    assert layer.statistics is not None
    own = rotaries_of(tiny("llama")).layers[2].rotary
    for mine, theirs in zip(layer.statistics.rotary.cos_sin(0, 204), own.cos_sin(0, 204), strict=True):
        assert torch.equal(mine, theirs)
    beyond = layer.statistics.rotary.cos_sin(203, 3)[0]
    assert torch.equal(beyond[0], beyond[2])


def test_replays_have_it(trace: Trace) -> None:
    method = kvrecall.methods.get("pariskv-balanced", top_k=8, **ZONES)
    assert prepared(trace, 2, method).shape.statistics is trace.layers[2].statistics
    assert trace.layers[0].shape.statistics is trace.layers[0].statistics
    assert replay(trace, method)[-1].recall > 0


def test_a_file_without_any_is_read(trace: Trace, tmp_path: Path) -> None:
    bare = Trace(trace.info, {n: replace(layer, statistics=None) for n, layer in trace.layers.items()})
    bare.save(tmp_path / "t")
    assert not [name for name in load_file(tmp_path / "t") if "rotary" in name or "second" in name]
    assert all(layer.statistics is None for layer in Trace.load(tmp_path / "t").layers.values())


@pytest.mark.parametrize(
    "told, tensors, said",
    [
        ({"layers": [7, 2]}, {}, "expected layers of the trace, got 7"),
        ({"layers": [0]}, {}, "lists of one length"),
        ({"rotaries": [0, 1]}, {}, "there is no rotary.1.cos"),
        ({"rotaries": [0, -1]}, {}, "rotaries"),
        ({"tokens": [1.5, 2]}, {}, "tokens"),
        ({"more": 1}, {}, "more: extra inputs"),
        ({}, {"rotary.0.cos": torch.zeros(203, 64)}, r"expected rotary.0.cos of shape \[204, 64\]"),
        ({}, {"rotary.0.sin": torch.full((204, 64), float("nan"))}, "contains NaN"),
        ({}, {"rotary.0.partner": torch.full((64,), 64)}, "pairs of coordinates"),
        ({}, {"rotary.0.partner": torch.zeros(64, dtype=torch.int64)}, "pairs of coordinates"),
        ({}, {"rotary.0.partner": torch.zeros(64)}, "torch.int64"),
        ({}, {"layer.0.key_mean": torch.zeros(4, 64)}, r"expected layer.0.key_mean of shape \[2, 64\]"),
        ({}, {"layer.2.key_covariance": torch.zeros(2, 64, 64, dtype=torch.float16)}, "torch.float32"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(
    trace: Trace, tmp_path: Path, told: dict[str, Any], tensors: dict[str, torch.Tensor], said: str
) -> None:
    path = tmp_path / "t"
    trace.save(path)
    with safe_open(path, framework="pt") as file:
        held = json.loads(file.metadata()["kvrecall"])
    held["calibration"] |= told
    save_file({**load_file(path), **tensors}, path, metadata={"kvrecall": json.dumps(held)})
    with pytest.raises(InputFileError, match=rf"not a trace \(.*{said}"):
        Trace.load(path)

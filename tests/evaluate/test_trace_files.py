"""Trace files of anybody: what does not fit together is refused when it is read, before compiled code sees it."""

from __future__ import annotations

import json
import os
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import kvrecall
from kvrecall.attend import attend_block, attend_causal
from kvrecall.core.errors import InputFileError, OutputFileError, ShapeError
from kvrecall.evaluate.recall import replay
from kvrecall.evaluate.trace import Trace
from tests.faults import limited_files
from tests.one_layer import ZONES, normal

INFO = {"model": "m", "prompt_tokens": 40, "steps": 3, "scaling": 0.125, "layers": [0], "text": ""}
SHAPES = {"keys": (1, 43, 64), "values": (1, 43, 64), "queries": (3, 2, 64), "prompt_queries": (2, 4, 64)}
DEEP = "[" * 100_000 + "]" * 100_000


def written(path: Path, info: object, tensors: dict[str, torch.Tensor]) -> Path:
    told = info if isinstance(info, str) else json.dumps(info)
    save_file({f"layer.0.{name}": tensor for name, tensor in tensors.items()}, path, metadata={"kvrecall": told})
    return path


def whole() -> dict[str, torch.Tensor]:
    return {name: normal(*shape, seed=i) for i, (name, shape) in enumerate(SHAPES.items())}


def test_a_whole_trace_is_read(tmp_path: Path) -> None:
    read = Trace.load(written(tmp_path / "t", INFO, whole()))
    assert read.info.prompt_tokens == 40 and read.info.layers == (0,)
    assert replay(read, kvrecall.Exact(top_k=4, **ZONES))[-1].recall > 0


@pytest.mark.parametrize(
    "change, said",
    [
        ({"prompt_tokens": 50}, r"expected keys of shape \[1, 53, 64\], got \[1, 43, 64\]"),
        ({"prompt_tokens": 30}, r"expected keys of shape \[1, 33, 64\]"),
        ({"steps": 4, "prompt_tokens": 39}, r"expected queries of shape \[4, 2, 64\]"),
        ({"prompt_tokens": 0}, "prompt_tokens: input should be greater than or equal to 1"),
        ({"prompt_tokens": -1}, "prompt_tokens"),
        ({"prompt_tokens": "40"}, "prompt_tokens: input should be a valid integer, got '40'"),
        ({"prompt_tokens": True}, "prompt_tokens"),
        ({"prompt_tokens": 10**30}, "expected keys of shape"),
        ({"steps": 0}, "steps"),
        ({"scaling": 0.0}, "scaling"),
        ({"scaling": None}, "scaling"),
        ({"scaling": float("nan")}, "NaN is not a number of JSON"),
        ({"layers": []}, "layers"),
        ({"layers": 3}, "layers"),
        ({"layers": [-1]}, "layers"),
        ({"layers": [1]}, "layer 1 has no keys"),
        ({"model": {"x": [1]}}, "model"),
        ({"more": 1}, "more: extra inputs"),
    ],
    ids=str,
)
def test_metadata_that_promise_something_else(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    with pytest.raises(InputFileError, match=rf"not a trace \(.*{said}"):
        Trace.load(written(tmp_path / "t", INFO | change, whole()))


@pytest.mark.parametrize("text", ["", "{", "[]", "7", "null", DEEP, '{"model": ' + DEEP + "}"], ids=lambda text: text[:12])
def test_metadata_that_are_none(tmp_path: Path, text: str) -> None:
    with pytest.raises(InputFileError, match="not a trace"):
        Trace.load(written(tmp_path / "t", text, whole()))


@pytest.mark.parametrize(
    "name, tensor",
    [
        ("keys", torch.ones(1, 43, 32)),
        ("keys", torch.ones(43, 64)),
        ("keys", torch.ones(0, 43, 64)),
        ("keys", torch.ones(3, 43, 64)),
        ("keys", torch.ones(1, 43, 64, dtype=torch.int64)),
        ("values", torch.ones(1, 42, 64)),
        ("values", torch.ones(1, 43, 64, dtype=torch.float64)),
        ("values", torch.full((1, 43, 64), float("nan"))),
        ("queries", torch.ones(3, 0, 64)),
        ("queries", torch.full((3, 2, 64), float("inf"))),
        ("queries", torch.ones(3, 2, 64, dtype=torch.bfloat16)),
        ("prompt_queries", torch.ones(2, 41, 64)),
        ("prompt_queries", torch.ones(1, 4, 64)),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{str(value.dtype)[6:]}-{'x'.join(map(str, value.shape))}",
)
def test_tensors_that_do_not_fit(tmp_path: Path, name: str, tensor: torch.Tensor) -> None:
    with pytest.raises(InputFileError, match=r"not a trace \(layer 0: "):
        Trace.load(written(tmp_path / "t", INFO, whole() | {name: tensor}))


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    tensors = whole()
    del tensors["prompt_queries"]
    with pytest.raises(InputFileError, match="layer 0 has no prompt_queries"):
        Trace.load(written(tmp_path / "t", INFO, tensors))


def test_a_file_that_was_cut_or_changed_anywhere_is_a_trace_or_refused(tmp_path: Path) -> None:
    """Every error is ours; what is read can be replayed."""
    data, draw = written(tmp_path / "t", INFO, whole()).read_bytes(), random.Random(0)
    refused = 0
    for case in range(300):
        changed = bytearray(data)
        if case % 2:
            del changed[draw.randrange(len(data)) :]
        else:
            for _ in range(draw.randint(1, 4)):
                changed[draw.randrange(1000)] = draw.randrange(256)
        (tmp_path / "c").write_bytes(changed)
        try:
            replay(Trace.load(tmp_path / "c"), kvrecall.Exact(top_k=4, **ZONES))
        except InputFileError:
            refused += 1
    assert refused > 200


@pytest.mark.parametrize("keys", [0, 3])
def test_attention_refuses_chunks_whose_parts_differ_in_length(keys: int) -> None:
    """Torch's kernel divides by the number of keys: a process ended, and nothing could be caught."""
    with pytest.raises(ShapeError, match=f"one key and value for each of 4 queries, got {keys} keys"):
        attend_causal(torch.ones(2, 4, 64), torch.ones(1, keys, 64), torch.ones(1, keys, 64), 0.1)
    with pytest.raises(ShapeError, match="a multiple of 2 heads"):
        attend_block(torch.ones(3, 4, 64), torch.ones(2, 5, 2, 64), 0.1)
    assert attend_causal(torch.ones(2, 0, 64), torch.ones(1, 0, 64), torch.ones(1, 0, 64), 0.1).out.shape == (1, 2, 0, 64)
    assert attend_block(torch.ones(2, 0, 64), torch.ones(1, 5, 2, 64), 0.1).out.shape == (1, 2, 0, 64)


def test_a_trace_that_cannot_be_written_is_not_there(tmp_path: Path) -> None:
    trace = Trace.load(written(tmp_path / "t", INFO, whole()))
    before = (tmp_path / "t").read_bytes()
    with limited_files(10_000), pytest.raises(OutputFileError, match="cannot be written"):
        trace.save(tmp_path / "t")
    assert (tmp_path / "t").read_bytes() == before and [file.name for file in tmp_path.iterdir()] == ["t"]


def test_a_pipe_is_written_to_and_stays_a_pipe(tmp_path: Path) -> None:
    """A library that writes a draft and renames it would put a file in the place of a pipe or a device."""
    trace = Trace.load(written(tmp_path / "t", INFO, whole()))
    os.mkfifo(tmp_path / "pipe")
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit((tmp_path / "pipe").read_bytes)
        trace.save(tmp_path / "pipe")
        (tmp_path / "copy").write_bytes(reading.result(20))
    assert (tmp_path / "pipe").is_fifo() and Trace.load(tmp_path / "copy").info == trace.info

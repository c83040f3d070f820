"""`python -m benchmarks`: what its commands refuse and hand over."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kvrecall
from benchmarks import __main__ as verbs
from benchmarks import gpu_decode, gpu_layer, gpu_prefill, models
from kvrecall.core.errors import ParameterError
from kvrecall.evaluate.trace import LayerTrace, Trace, TraceInfo
from kvrecall.methods.spec import RECOMMENDED
from tests.cli.conftest import Cli

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch) -> Cli:
    """The commands of the benchmarks where there is a GPU, as it seems to them."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    return Cli(verbs.commands)


def test_they_are_a_program_of_the_repository() -> None:
    program = [sys.executable, "-m", "benchmarks", "layer", "--help"]
    environment = os.environ | {"COLUMNS": "200", "NO_COLOR": "1"}
    run = subprocess.run(program, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0 and "python -m benchmarks layer" in run.stdout and "balanced-plain" in run.stdout, run.stderr


@pytest.mark.parametrize(
    ("verb", "what"),
    [("layer", "configs"), ("decode", "configs"), ("prefill", "configs"), ("ops", "ops"), ("methods", "systems")],
)
def test_they_say_what_they_cannot_measure(cli: Cli, verb: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "CUDA GPU" in cli.error(verb)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    kind = "configuration or method" if what == "configs" else "configuration"
    assert f"unknown {kind} 'papers'" in cli.error(verb, f"--{what}", "papers")
    assert "unknown shape '70b'" in cli.error(verb, "--shape", "70b")
    assert "1.5k" in cli.error(verb, "--context", "1.5k")


def test_configurations_are_names_or_methods_in_the_one_grammar(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(gpu_prefill, "measure", lambda *arguments: asked.append(arguments[4]))
    monkeypatch.setattr(verbs, "_rows", lambda measure, each, *_: {"rows": [measure(*arguments) for arguments in each]})
    scheduled = "pariskv:schedule=[[5000,0.5,0.5],[null,0.1,0.2]];gqa=max@64"
    cli("prefill", "--configs", f"product,{scheduled},recommended,LouisKV:threshold=0.85@128")
    assert asked == ["product", scheduled, RECOMMENDED, "LouisKV:threshold=0.85@128"]
    louis = kvrecall.LouisKV(threshold=0.85, top_k=128, full_attention_threshold=0)
    assert models.method_of("louiskv:threshold=0.85@128", 9) == louis
    assert models.method_of("product", 9) == gpu_layer.CONFIGS["product"](9)
    for wrong, said in (("pariskv:top_k", "method: expected NAME"), ("pariskv:gqa=most", "gqa"), ("pariskv:color=1", "color")):
        assert said in cli.error("decode", "--configs", wrong)
    assert "expected pariskv or pariskv-balanced, got 'prkv'" in cli.error("layer", "--configs", "prkv")


def test_they_name_all_configurations_and_shapes() -> None:
    assert sorted(verbs.LAYER_CONFIGS) == sorted(gpu_layer.CONFIGS)
    assert sorted(verbs.LAYER_CONFIGS + verbs.MODEL_CONFIGS) == sorted(models.CONFIGS)
    assert (tuple(gpu_layer.SHAPES), tuple(models.SHAPES)) == (verbs.LAYER_SHAPES, verbs.MODEL_SHAPES)


def test_whole_models_say_which_layers_and_sides_there_are(cli: Cli) -> None:
    for verb in ("decode", "prefill"):
        assert "numbers such as 8 or 8,16" in cli.error(verb, "--layers", "8,")
        assert "numbers such as 8 or 8,16" in cli.error(verb, "--layers", "0")
    assert "unknown side 'ours'" in cli.error("decode", "--side", "ours")


def test_decode_hands_over_its_trace_and_tells_what_it_measures(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(*arguments: object, trace: Trace) -> None:
        asked.append((*arguments, trace.info.model))
        raise ParameterError("here", "no further", "this far", "That was the test.")

    asked: list[tuple[object, ...]] = []
    layer = LayerTrace(*(torch.ones(1, tokens, 128) for tokens in (9, 9, 1, 4)))
    Trace(TraceInfo("m", 8, 1, 0.1, (0,)), {0: layer}).save(tmp_path / "t")
    monkeypatch.setattr(gpu_decode, "measure", measure)
    told = cli("decode", "--trace", tmp_path / "t", "--context", "1k", "--side", "retrieval").stderr
    assert asked == [("llama-3.1-8b", None, 1024, 1, "product+traced", 600, "retrieval", "m")]
    assert told.splitlines()[0] == "measuring llama-3.1-8b 1024 1 product+traced 600 retrieval" and "tensor" not in told

"""`kvrecall bench`: found in a clone of the repository and nowhere else; what its verbs refuse and hand over."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kvrecall
from benchmarks import cli as verbs
from benchmarks import gpu_decode, gpu_layer, gpu_prefill, models
from kvrecall.cli import bench
from kvrecall.core.errors import ParameterError
from kvrecall.evaluate.trace import LayerTrace, Trace, TraceInfo
from kvrecall.methods.spec import RECOMMENDED
from tests.cli.conftest import Cli

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current directory, and kvrecall as if it lay among installed packages."""
    monkeypatch.setattr(kvrecall, "__file__", str(tmp_path / "lib" / "site-packages" / "kvrecall" / "__init__.py"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_source_tree_is_found_wherever_one_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert bench.repository() == ROOT


def test_an_installed_package_finds_the_clone_around_the_current_directory(
    wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in (ROOT, ROOT / "tests" / "cli"):
        monkeypatch.chdir(folder)
        assert bench.repository() == ROOT


@pytest.mark.parametrize("arguments", [[], ["--help"], ["layer"], ["decode", "--configs", "balanced"], ["nothing"]])
def test_without_a_clone_every_call_ends_with_one_error(cli: Cli, wheel: Path, arguments: list[str]) -> None:
    (wheel / "benchmarks").mkdir()
    (wheel / "benchmarks" / "cli.py").write_text("raise SystemExit('somebody else's')")
    assert cli.error("bench", *arguments) == (
        "ParameterError: benchmarks: expected a clone of kvrecall's repository around the current directory, "
        f"got {str(wheel)!r}. Benchmarks are part of the repository, not of the wheel; clone it and run the command there."
    )


def test_a_copied_package_runs_the_benchmarks_of_a_clone(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "src" / "kvrecall", tmp_path / "site" / "kvrecall", ignore=shutil.ignore_patterns("__pycache__"))
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site"), "COLUMNS": "200", "NO_COLOR": "1"}
    # -P: no current directory among the folders of modules, as for an installed script.
    program = [sys.executable, "-P", "-c", "from kvrecall.cli import main; main()", "bench", "layer", "--help"]
    outside, inside = (
        subprocess.run(program, cwd=at, env=environment, capture_output=True, text=True) for at in (tmp_path, ROOT / "docs")
    )
    assert outside.returncode == 2 and outside.stderr.startswith("error: benchmarks: expected a clone") and not outside.stdout
    assert inside.returncode == 0 and "balanced-plain" in inside.stdout, inside.stderr


def test_only_its_own_call_looks_for_a_clone(cli: Cli, wheel: Path) -> None:
    told = cli("--help")
    assert told.exit_code == 0 and "bench" in told.stdout


@pytest.mark.parametrize(
    ("verb", "what"),
    [("layer", "configs"), ("decode", "configs"), ("prefill", "configs"), ("ops", "ops"), ("methods", "systems")],
)
def test_bench_says_what_it_cannot_measure(cli: Cli, verb: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "CUDA GPU" in cli.error("bench", verb)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    kind = "configuration or method" if what == "configs" else "configuration"
    assert f"unknown {kind} 'papers'" in cli.error("bench", verb, f"--{what}", "papers")
    assert "unknown shape '70b'" in cli.error("bench", verb, "--shape", "70b")
    assert "1.5k" in cli.error("bench", verb, "--context", "1.5k")


def test_configurations_are_names_or_methods_in_the_one_grammar(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    asked: list[str] = []
    monkeypatch.setattr(gpu_prefill, "measure", lambda *arguments: asked.append(arguments[4]))
    monkeypatch.setattr(verbs, "_rows", lambda measure, each, *_: {"rows": [measure(*arguments) for arguments in each]})
    scheduled = "pariskv:schedule=[[5000,0.5,0.5],[null,0.1,0.2]];gqa=max@64"
    cli("bench", "prefill", "--configs", f"product,{scheduled},recommended,LouisKV:threshold=0.85@128")
    assert asked == ["product", scheduled, RECOMMENDED, "LouisKV:threshold=0.85@128"]
    louis = kvrecall.LouisKV(threshold=0.85, top_k=128, full_attention_threshold=0)
    assert models.method_of("louiskv:threshold=0.85@128", 9) == louis
    assert models.method_of("product", 9) == gpu_layer.CONFIGS["product"](9)
    for wrong, said in (("pariskv:top_k", "method: expected NAME"), ("pariskv:gqa=most", "gqa"), ("pariskv:color=1", "color")):
        assert said in cli.error("bench", "decode", "--configs", wrong)
    assert "expected pariskv or pariskv-balanced, got 'prkv'" in cli.error("bench", "layer", "--configs", "prkv")


def test_bench_names_all_configurations_and_shapes() -> None:
    assert sorted(verbs.LAYER_CONFIGS) == sorted(gpu_layer.CONFIGS)
    assert sorted(verbs.LAYER_CONFIGS + verbs.MODEL_CONFIGS) == sorted(models.CONFIGS)
    assert (tuple(gpu_layer.SHAPES), tuple(models.SHAPES)) == (verbs.LAYER_SHAPES, verbs.MODEL_SHAPES)


def test_bench_of_whole_models_says_which_layers_and_sides_there_are(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    for verb in ("decode", "prefill"):
        assert "numbers such as 8 or 8,16" in cli.error("bench", verb, "--layers", "8,")
        assert "numbers such as 8 or 8,16" in cli.error("bench", verb, "--layers", "0")
    assert "unknown side 'ours'" in cli.error("bench", "decode", "--side", "ours")


def test_bench_decode_hands_over_its_trace_and_tells_what_it_measures(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(*arguments: object, trace: Trace) -> None:
        asked.append((*arguments, trace.info.model))
        raise ParameterError("here", "no further", "this far", "That was the test.")

    asked: list[tuple[object, ...]] = []
    layer = LayerTrace(*(torch.ones(1, tokens, 128) for tokens in (9, 9, 1, 4)))
    Trace(TraceInfo("m", 8, 1, 0.1, (0,)), {0: layer}).save(tmp_path / "t")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(gpu_decode, "measure", measure)
    told = cli("bench", "decode", "--trace", tmp_path / "t", "--context", "1k", "--side", "retrieval").stderr
    assert asked == [("llama-3.1-8b", None, 1024, 1, "product+traced", 600, "retrieval", "m")]
    assert told.splitlines()[0] == "measuring llama-3.1-8b 1024 1 product+traced 600 retrieval" and "tensor" not in told

"""`kvrecall calibrate-maps`: the file lies where caches of the model find it."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch

from kvrecall import models
from kvrecall.backends.transformers.calibration import calibration_of, load
from tests.cli.conftest import Cli


def test_written_where_it_is_found(cli: Cli, tiny: Path, tmp_path: Path) -> None:
    told = cli.json("calibrate-maps", tiny, "--tokens", "300", "--chunk-tokens", "128", "--dtype", "float32")
    path = Path(told["file"])
    assert path.parent == tmp_path / "calibration" and path.stat().st_size == told["bytes"]
    assert told["tokens"] == 300 and told["layers"] == [0]
    model, _ = models.load(tiny, dtype=torch.bfloat16, device="cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = calibration_of(model)
    assert found is not None and found.settled and found.tokens == 300


def test_own_text_and_place(cli: Cli, tiny: Path, document: Path, tmp_path: Path) -> None:
    out = tmp_path / "there.safetensors"
    result = cli("calibrate-maps", tiny, "--text", document, "--out", out, "--dtype", "float32")
    assert result.exit_code == 0, result.output
    assert f"wrote {out}: 3,000 tokens, 1 layers" in result.stderr.replace("\n", "")
    model, _ = models.load(tiny, dtype=torch.float32, device="cpu")
    assert load(model, out).tokens == 3000
    assert not (tmp_path / "calibration").exists()


def test_mistakes(cli: Cli, tiny: Path, tmp_path: Path) -> None:
    assert "--tokens: expected 2 to 4,096 tokens, got 5000" in cli.error("calibrate-maps", tiny, "--tokens", "5000")
    assert "cannot be read" in cli.error("calibrate-maps", tiny, "--text", tmp_path / "none")
    assert "cannot be written" in cli.error("calibrate-maps", tiny, "--out", tmp_path / "no" / "f")
    (tmp_path / "short").write_text("the")
    assert "2 tokens or more" in cli.error("calibrate-maps", tiny, "--text", tmp_path / "short")

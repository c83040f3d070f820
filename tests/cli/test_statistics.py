"""`kvrecall statistics`: the file lies where caches of the model find it."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch

from kvrecall import models
from kvrecall.backends.transformers.statistics import Source, statistics_of
from tests.cli.conftest import Cli
from tests.tiny import WORDS


def test_written_where_it_is_found(cli: Cli, tiny: Path, tmp_path: Path) -> None:
    told = cli.json("statistics", tiny, "--dtype", "float32")
    path = Path(told["file"])
    assert path.parent == tmp_path / "statistics" and path.stat().st_size == told["bytes"]
    assert told["tokens"] == 1024 and told["layers"] == [0]
    model, tokenizer = models.load(tiny, dtype=torch.bfloat16, device="cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = statistics_of(model, tokenizer)
    assert found.layers[0].keys.tokens == 1024


def test_own_text_until_the_next_call(cli: Cli, tiny: Path, tmp_path: Path) -> None:
    document = tmp_path / "own.txt"
    document.write_text(" ".join(WORDS[number * number % len(WORDS)] for number in range(3000)))
    told = cli.json("statistics", tiny, "--text", document, "--dtype", "float32")
    assert told["text"] == document.name and told["file"].endswith("own-text.safetensors")
    model, tokenizer = models.load(tiny, dtype=torch.float32, device="cpu")
    expected = Source.of(model.config, tokenizer, document.read_text(), "")
    assert expected.ids != Source.of(model.config, tokenizer).ids
    own = statistics_of(model, tokenizer).layers[0].keys.key_mean
    cli.json("statistics", tiny, "--dtype", "float32")
    assert not torch.equal(statistics_of(model, tokenizer).layers[0].keys.key_mean, own)


def test_mistakes(cli: Cli, tiny: Path, tmp_path: Path) -> None:
    assert "cannot be read" in cli.error("statistics", tiny, "--text", tmp_path / "none")
    (tmp_path / "short").write_text("the the the")
    assert "different tokens where" in cli.error("statistics", tiny, "--text", tmp_path / "short")

"""The command line on a tiny model in a folder, or on none at all."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer import Typer
from typer.main import get_command
from typer.testing import CliRunner

from kvrecall.cli.app import app
from tests.tiny import save_tiny_model

made = cache(get_command)
"""typer's command of an app, which it would build again for every call: twice the time that most calls take."""


class Cli:
    """Runs verbs in this process; `json` runs one with --json and parses the only thing on standard output."""

    def __init__(self, commands: Typer = app) -> None:
        self.commands = commands

    def __call__(self, *args: object, stdin: str | None = None) -> Result:
        return CliRunner().invoke(self.commands, [str(a) for a in args], input=stdin)

    def json(self, *args: object, exit_code: int = 0) -> dict[str, Any]:
        result = self(*args, "--json")
        assert result.exit_code == exit_code, result.output
        (line,) = result.stdout.splitlines()
        return json.loads(line)

    def error(self, *args: object) -> str:
        """The message of a failing call: the same words in both forms, one line, no traceback."""
        told = self.json(*args, exit_code=2)["error"]
        plain = self(*args)
        assert plain.exit_code == 2 and plain.stdout == "" and "Traceback" not in plain.stderr
        assert plain.stderr == f"error: {told['message']}\n"
        return f"{told['type']}: {told['message']}"


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """With an empty folder of models and hub's cache, so that nothing here can load or fetch a real one unnoticed."""
    monkeypatch.setenv("KVRECALL_MODELS", str(tmp_path / "models"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("typer.testing._get_command", made, raising=False)
    return Cli()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny model with a context of 16,384 tokens."""
    return save_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def document(tmp_path: Path) -> Path:
    """A text file of 3,000 words."""
    path = tmp_path / "log.txt"
    path.write_text("the red boat . " * 750, encoding="utf-8")
    return path

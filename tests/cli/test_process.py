"""Waiting threads sleep, unless the environment says otherwise; who decided it is told."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from kvrecall import __version__
from kvrecall.cli import process
from tests.cli.conftest import Cli


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """As before torch is imported, with an environment that decides nothing."""
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr(process, "_set_here", False)
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"):
        monkeypatch.setenv(name, "")  # so that it is put back, whatever the code does
        monkeypatch.delenv(name)
    return monkeypatch


def test_threads_sleep_and_another_program_finds_nothing_of_it(fresh: pytest.MonkeyPatch) -> None:
    assert process.waiting() == "busy, OpenMP's default"
    process.wait_passively()
    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE" and "kvrecall's choice" in process.waiting()
    process.leave_environment()
    assert "OMP_WAIT_POLICY" not in os.environ


@pytest.mark.parametrize("name", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"])
def test_the_environment_decides_first(fresh: pytest.MonkeyPatch, name: str) -> None:
    fresh.setenv(name, "ACTIVE")
    process.wait_passively()
    process.leave_environment()
    assert os.environ[name] == "ACTIVE" and process.waiting() == f"as {name}=ACTIVE says"


def test_the_command_decides_before_torch_is_there() -> None:
    program = [sys.executable, "-c", "from kvrecall.cli import main; main()", "info", "--json"]
    environment = {name: value for name, value in os.environ.items() if name not in (process.POLICY, *process._OTHER_VARIABLES)}
    told = json.loads(subprocess.run(program, capture_output=True, check=True, text=True, env=environment).stdout)
    assert told["devices"][0]["waiting"] == "asleep (kvrecall's choice)"


def test_version(cli: Cli) -> None:
    assert cli("--version").stdout == f"kvrecall {__version__}\n"

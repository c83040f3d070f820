"""Faults around the command line: a process that is killed or interrupted, a full disk, an output that nobody reads."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvrecall.evaluate.runs import read_records
from tests.cli.conftest import Cli
from tests.evaluate.asked import without_times
from tests.faults import Command, limited_files

CODE = "from kvrecall.cli import main; main()"
EVAL = ("eval", "--tasks", "json-kv:2", "--methods", "streaming", "--context", "400", "--samples", "12", "--dtype", "float32")
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}


def started(*args: object, **options: object) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", CODE, *map(str, args)]
    return subprocess.Popen(command, env=ENVIRONMENT, **({"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE} | options))  # type: ignore[call-overload]


def samples(folder: Path) -> int:
    return sum(file.read_bytes().count(b"\n") for file in folder.glob("samples*.jsonl"))


@pytest.fixture(scope="module")
def whole(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """The records of a run that nothing disturbed."""
    out = tmp_path_factory.mktemp("whole") / "run"
    Cli().json(*EVAL, "-m", tiny, "--out", out)
    return without_times(read_records(out))


@pytest.mark.parametrize(
    "number, shard", [(signal.SIGKILL, "1/1"), (signal.SIGKILL, "1/2"), (signal.SIGINT, "1/1"), (signal.SIGTERM, "1/1")]
)
def test_an_eval_that_is_ended_at_any_moment_goes_on(
    cli: Cli, tiny: Path, tmp_path: Path, whole: list[dict], number: signal.Signals, shard: str
) -> None:
    """Ended after a few samples, then a random while later; the rest is made by a second call, none lost or doubled."""
    draw, had = random.Random(number), len(whole)
    for attempt in range(5):  # on a busy machine it may have made them all before it is ended
        out = tmp_path / f"run-{attempt}"
        running = Command(tmp_path / "said", *EVAL, "-m", tiny, "--out", out, "--shard", shard)
        until = time.monotonic() + 300
        while samples(out) < 2 and not running.ended and time.monotonic() < until:
            time.sleep(0.002)
        time.sleep(draw.random() * 0.05)
        running.send_signal(number)
        said, code = running.wait()
        assert code in (0, -number, 130) and b"Traceback" not in said
        had = samples(out)
        for share in ("1/1",) if shard == "1/1" else ("1/2", "2/2"):
            told = cli.json(*EVAL, "-m", tiny, "--out", out, "--shard", share)
        assert had >= 2 and len(whole) == told["samples"]
        assert without_times(read_records(out)) == whole
        if had < (len(whole) if shard == "1/1" else len(whole) // 2):
            break
    assert had < len(whole)


def test_two_evals_into_one_folder(tiny: Path, tmp_path: Path, whole: list[dict]) -> None:
    out = tmp_path / "run"
    both = [Command(tmp_path / f"said-{i}", *EVAL, "-m", tiny, "--out", out) for i in range(2)]
    ended = [each.wait() for each in both]
    assert all(b"Traceback" not in said for said, _ in ended)
    assert all(code == 0 or (code == 2 and b"expected no other run to write here" in said) for said, code in ended)
    assert without_times(read_records(out)) == whole


def test_a_full_disk_ends_an_eval_with_a_line_and_loses_nothing(
    cli: Cli, tiny: Path, tmp_path: Path, whole: list[dict]
) -> None:
    out = tmp_path / "run"
    with limited_files(2500):
        said = cli.json(*EVAL, "-m", tiny, "--out", out, exit_code=2)["error"]
    assert said["type"] == "OutputFileError" and "Free some space" in said["message"]
    assert 0 < samples(out) < len(whole)
    cli.json(*EVAL, "-m", tiny, "--out", out)
    assert without_times(read_records(out)) == whole


LIST = ("eval", "--tasks", "list")
FORMS = pytest.mark.parametrize("options", [(), ("--json",)], ids=["table", "json"])


@FORMS
def test_an_output_that_nobody_reads(options: tuple[str, ...]) -> None:
    """As with `| head -0`: no traceback, and the exit code of a program that SIGPIPE ended."""
    read, write = os.pipe()
    os.close(read)
    running = started(*LIST, *options, stdout=write)
    os.close(write)
    said = running.communicate(timeout=300)[1]
    assert (running.returncode, said) == (141, b"")


@FORMS
def test_an_output_on_a_full_disk(options: tuple[str, ...]) -> None:
    with open("/dev/full", "wb") as full:
        running = started(*LIST, *options, stdout=full)
        said = running.communicate(timeout=300)[1].decode()
    assert (running.returncode, said) == (2, "error: standard output or a file: No space left on device\n")


def test_a_process_without_an_output() -> None:
    running = started(*LIST, "--json", stdout=None, preexec_fn=lambda: os.close(1))
    said = running.communicate(timeout=300)[1]
    assert (running.returncode, said) == (0, b"")


@pytest.mark.parametrize("verb", ["trace", "report", "tune"])
def test_a_full_disk_leaves_what_was_there(cli: Cli, tiny: Path, document: Path, tmp_path: Path, verb: str) -> None:
    out = tmp_path / "there.json"
    out.write_text("before")
    calls: dict[str, tuple[object, ...]] = {
        "trace": ("trace", out, document, "-m", tiny, "--tokens", "400", "--steps", 2),
        "report": ("report", tmp_path / "run", "--out", out),
        "tune": ("tune", "--text", document, "-m", tiny, "--tokens", "400", "--steps", 2, "--out", out),
    }
    if verb == "report":
        pytest.importorskip("matplotlib")
        (tmp_path / "run").mkdir()
        record = {"task": "t", "condition": "full", "score": 1.0}
        (tmp_path / "run" / "config.json").write_text("{}")
        (tmp_path / "run" / "samples.jsonl").write_text(json.dumps(record) + "\n")
    if verb != "report":
        cli.json(*calls[verb])  # what it compiles is compiled now, so that no cache of numba's is written below
        out.write_text("before")
    with limited_files(100):
        said = cli.json(*calls[verb], exit_code=2)["error"]
    assert said["type"] == "OutputFileError" and f"{out}: cannot be written (" in said["message"]
    assert out.read_text() == "before" and not list(tmp_path.glob("*.draft")) + list(tmp_path.glob(".*"))

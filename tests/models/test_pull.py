"""Fetching a known model: the hash decides, what is there is taken, and a smaller model where the default is not to be had."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvrecall.core.errors import ModelFilesError, UnknownNameError
from kvrecall.models import DEFAULT, FALLBACK, default_model, find, pull
from tests.models import child
from tests.models.conftest import CONTENT, FILE, NAME
from tests.models.fake_hub import FakeHub


def test_the_file_arrives_in_the_cache_of_the_hub(hub: FakeHub, hub_cache: Path) -> None:
    path = pull(NAME)
    assert path.is_relative_to(hub_cache) and path.read_bytes() == CONTENT and path == find(NAME)


def test_a_file_in_the_folder_comes_first(hub: FakeHub, models_folder: Path) -> None:
    pull(NAME)
    models_folder.mkdir()
    (models_folder / FILE).write_bytes(CONTENT)
    assert pull(NAME) == models_folder / FILE


def test_a_file_of_another_size_does_not_count(hub: FakeHub, models_folder: Path) -> None:
    models_folder.mkdir()
    (models_folder / FILE).write_bytes(CONTENT[:-1])
    assert find(NAME) is None and pull(NAME).read_bytes() == CONTENT


def test_wrong_bytes_are_removed_and_named(hub: FakeHub, hub_cache: Path) -> None:
    right = hub.files[FILE]
    hub.files[FILE] = right[:-1] + b"?"
    with pytest.raises(ModelFilesError, match=r"and sha256 .*, expected"):
        pull(NAME)
    assert find(NAME) is None and not list(hub_cache.rglob("blobs/*"))
    hub.files[FILE] = right
    assert pull(NAME).read_bytes() == CONTENT


def test_processes_that_pull_together_fetch_once(hub: FakeHub) -> None:
    pullers = [child.start(lambda: pull(NAME)) for _ in range(4)]
    assert {puller.result() for puller in pullers} == {str(find(NAME))} and hub.sent == len(CONTENT)


def test_unknown_name() -> None:
    with pytest.raises(UnknownNameError, match="smollm2-135m"):
        pull("smollm")


def test_default_model_falls_back_with_a_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    def only_small(name: str, on_notice: object = None) -> None:
        if name != FALLBACK:
            raise ModelFilesError(name, "no room", "Make some.")

    def none(name: str, on_notice: object = None) -> None:
        raise ModelFilesError(name, "no network", "Check it.")

    module = sys.modules[pull.__module__]
    notices: list[str] = []
    monkeypatch.setattr(module, "pull", only_small)
    assert default_model(on_notice=notices.append) == FALLBACK
    assert DEFAULT in notices[0] and FALLBACK in notices[0]
    monkeypatch.setattr(module, "pull", lambda *_: None)
    assert default_model(on_notice=notices.append) == DEFAULT and len(notices) == 1
    monkeypatch.setattr(module, "pull", none)
    with pytest.raises(ModelFilesError, match=DEFAULT):
        default_model(on_notice=notices.append)
    assert len(notices) == 1

"""What the hub's client does is used: cache, resumption, offline mode; what it raises is one line with a remedy."""

from __future__ import annotations

import logging
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from huggingface_hub import constants, hf_hub_download

from kvrecall.core.errors import ModelFilesError
from kvrecall.models import find, load, load_config, pull
from kvrecall.models.files import remove
from kvrecall.models.registry import KnownModel
from tests.models import child
from tests.models.conftest import CONTENT, FILE, NAME, REPO
from tests.models.fake_hub import FakeHub
from tests.tiny import save_tiny_model


def refused(spec: str = NAME) -> str:
    with pytest.raises(ModelFilesError) as caught:
        pull(spec)
    told = str(caught.value)
    assert "\n" not in told and "127.0.0.1" not in told and told.startswith(f"model {spec!r}: ")
    return told


ANSWERS = {
    (401, ""): "(HfHubHTTPError: HTTP 401). Check the name, the network, the disk and your HF_TOKEN",
    (403, ""): "(HfHubHTTPError: HTTP 403). Check the name",
    (401, "RepoNotFound"): "(RepositoryNotFoundError: HTTP 401). Check the name; if it is private, log in",
    (404, "RepoNotFound"): "(RepositoryNotFoundError: HTTP 404). Check the name; if it is private, log in",
    (403, "GatedRepo"): "(GatedRepoError: HTTP 403). Accept its licence",
    (404, "RevisionNotFound"): "(RevisionNotFoundError: HTTP 404). Check the name",
    (429, ""): "(HfHubHTTPError: HTTP 429). Check the name, the network",
    (500, ""): "(HfHubHTTPError: HTTP 500). Check the name, the network",
}


@pytest.mark.parametrize("status, code", ANSWERS)
def test_every_refusal_is_one_line_with_a_remedy(hub: FakeHub, status: int, code: str) -> None:
    hub.status, hub.error_code = status, code
    assert ANSWERS[status, code] in refused()


def test_a_file_that_the_repository_lacks(hub: FakeHub) -> None:
    del hub.files[FILE]
    assert f"(FileNotFoundError: no {FILE} in {REPO})" in refused()


def test_a_hub_that_is_not_there(hub: FakeHub) -> None:
    hub.stop()
    assert "cannot be fetched from the model hub (ConnectError). Check the name, the network" in refused()


def test_a_hub_that_stays_silent_is_given_up(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 0.5)
    hub.silent = True
    assert "cannot be fetched from the model hub (ReadTimeout)" in refused()


def test_a_cut_connection_is_resumed(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 100_000)
    hub.cut_after = [700_000, 500_000]
    notices: list[str] = []
    assert pull(NAME, notices.append).read_bytes() == CONTENT
    assert hub.ranges == [None, "bytes=700000-", "bytes=1200000-"] and hub.sent == len(CONTENT)
    assert notices == [f"fetching {NAME}, 2 MiB"]


def test_a_connection_that_is_cut_again_and_again(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    hub.cut_after = [1000] * 20
    assert "cannot be fetched from the model hub (RemoteProtocolError)" in refused()
    assert not find(NAME)
    hub.cut_after = []
    assert pull(NAME).read_bytes() == CONTENT


def test_what_the_cache_holds_is_not_fetched_and_the_hub_not_asked(hub: FakeHub) -> None:
    path = pull(NAME)
    hub.requests.clear()
    assert pull(NAME) == find(NAME) == path and hub.requests == []


def test_offline_mode_takes_the_cache_and_names_itself(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(constants, "HF_HUB_OFFLINE", True)
        assert "(OfflineModeIsEnabled). Unset HF_HUB_OFFLINE" in refused()
        assert hub.requests == []
    path = pull(NAME)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert pull(NAME) == path


def test_a_cache_that_holds_another_file_of_the_repository(hub: FakeHub, hub_cache: Path) -> None:
    hf_hub_download(REPO, "other.gguf")
    hub.status = 500
    assert "(HfHubHTTPError: HTTP 500)" in refused()


def test_nothing_but_the_error_is_said(
    hub: FakeHub, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No bars, no log of retries; the client's own verbosity is as before."""
    from huggingface_hub.utils import logging as own

    monkeypatch.setattr("time.sleep", lambda seconds: None)
    before, hub.cut_after = own.get_verbosity(), [1000] * 3
    with caplog.at_level(logging.WARNING):
        pull(NAME)
    assert capsys.readouterr() == ("", "") and not caplog.records and own.get_verbosity() == before


@pytest.mark.parametrize("limit", [0, 1, 1_000_100])
def test_a_disk_that_fills_up(hub: FakeHub, hub_cache: Path, limit: int) -> None:
    told = child.start(lambda: pull(NAME), file_bytes=limit).result()
    assert told.startswith("ModelFilesError") and "cannot be fetched" in told and "\n" not in told, told
    assert pull(NAME).read_bytes() == CONTENT


def test_a_cache_that_cannot_be_made(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "file" / "hub"))
    assert "NotADirectoryError" in refused()


def test_kills_leave_no_half_file(hub: FakeHub, hub_cache: Path) -> None:
    rng = random.Random(0)
    for _ in range(10):
        process = child.start(lambda: pull(NAME))
        time.sleep(rng.uniform(0, 0.1))
        process.kill()
        assert find(NAME) is None or find(NAME).read_bytes() == CONTENT  # type: ignore[union-attr]
    assert pull(NAME).read_bytes() == CONTENT


class TestRemove:
    """Deleting one file from the cache that other tools share."""

    def test_other_files_stay(self, hub: FakeHub, hub_cache: Path) -> None:
        pull(NAME)
        other = Path(hf_hub_download(REPO, "other.gguf"))
        remove(NAME)
        assert find(NAME) is None and other.read_bytes() == b"GGUF other"
        assert sum(path.stat().st_size for path in hub_cache.rglob("blobs/*")) == len(b"GGUF other")

    @pytest.mark.parametrize("made", [True, False])
    def test_nothing_there(self, known_model: KnownModel, models_folder: Path, hub_cache: Path, made: bool) -> None:
        if made:
            hub_cache.mkdir()
        assert remove(NAME) == 0


class TestRepository:
    """A repository with a config and weights, as transformers loads it."""

    @pytest.fixture
    def files(self, hub: FakeHub, tmp_path: Path) -> FakeHub:
        folder = save_tiny_model(tmp_path / "made")
        hub.files = {path.name: path.read_bytes() for path in folder.iterdir()}
        hub.files |= {"pytorch_model.bin": b"the same again", "consolidated.safetensors": b"and again", "README.md": b"# text"}
        return hub

    def test_what_transformers_reads_is_fetched_and_loaded(self, files: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
        model, tokenizer = load(REPO, dtype="float32", device="cpu")
        assert len(model.model.layers) == 1 and tokenizer("red").input_ids == [6]
        fetched = {request.rsplit("/", 1)[1] for request in files.requests if request.startswith(f"GET /{REPO}/resolve")}
        assert fetched == set(files.files) - {"pytorch_model.bin", "consolidated.safetensors", "README.md"}
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        assert load(REPO, dtype="float32", device="cpu")[0].config.vocab_size == model.config.vocab_size

    def test_a_config_alone_is_fetched_for_a_plan(self, files: FakeHub) -> None:
        assert load_config(REPO).num_hidden_layers == 1
        assert [r.rsplit("/", 1)[1] for r in files.requests if r.startswith(f"GET /{REPO}")] == ["config.json"]

    def test_weights_in_the_older_format_are_fetched_where_there_are_no_others(self, files: FakeHub) -> None:
        del files.files["model.safetensors"]
        assert (pull(REPO) / "pytorch_model.bin").read_bytes() == b"the same again"

    def test_damaged_files_are_refused(self, files: FakeHub) -> None:
        files.files["config.json"] = b"[]"
        with pytest.raises(ModelFilesError, match=r"config\.json holds a list"):
            load(REPO, dtype="float32", device="cpu")


def test_the_command_line_asks_the_endpoint_of_the_environment(hub: FakeHub, tmp_path: Path) -> None:
    """In a process of its own, as users start it: the error is one line, the exit code 2."""
    hub.status, hub.error_code = 403, "GatedRepo"
    environment = os.environ | {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
    command = [sys.executable, "-c", "from kvrecall.cli import main; main()", "models", "pull", "smollm2-135m"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    notice, error = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (2, "") and notice == "fetching smollm2-135m, 94 MiB"
    assert error.startswith("error: model 'smollm2-135m': cannot be fetched from the model hub (GatedRepoError: HTTP 403).")

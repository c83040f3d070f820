"""The command line of vLLM's server: what is chosen, what the user's options change, what is refused before anything starts."""

from __future__ import annotations

import json
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from kvrecall.backends.vllm import command
from kvrecall.backends.vllm.command import serve_command, start_of
from kvrecall.core.errors import KVRecallError, ParameterError

EXACT: dict[str, Any] = {"method": "exact"}


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "start_of", lambda model: ["vllm", "serve", model])
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)


def options(arguments: list[str]) -> list[str]:
    """Behind the model; `--additional-config` stands last of ours."""
    assert arguments[:3] == ["vllm", "serve", "org/model"]
    return arguments[3:]


def test_our_settings_and_those_of_the_server() -> None:
    made = serve_command("org/model", EXACT | {"top_k": 64}, {"port": 8001, "max-model-len": None}, [])
    config = json.dumps({"kvrecall": {"method": "exact", "top_k": 64}})
    ours = ["--attention-backend", "CUSTOM", "--block-size", "128", "--port", "8001", "--additional-config", config]
    assert options(made.arguments) == ours
    assert made.settings.method.top_k == 64 and made.retrieves


@pytest.mark.parametrize("given", [["--block-size", "256"], ["--block_size=256"], ["--seed", "3", "--block-size=256"]])
def test_what_is_handed_on_wins_and_is_left_as_it_is(given: list[str]) -> None:
    made = options(serve_command("org/model", EXACT, {"port": 8001}, given).arguments)
    assert made[-len(given) :] == given and "128" not in made and "8001" in made


def test_the_user_s_options_stand_behind_ours_so_that_short_forms_win_too() -> None:
    made = options(serve_command("org/model", EXACT, {}, ["--block-si", "256", "-tp", "2"]).arguments)
    assert made.index("--block-size") < made.index("--block-si") and made[-2:] == ["-tp", "2"]


@pytest.mark.parametrize(
    "given",
    [
        ["--additional-config", '{"other": 1, "kvrecall": {"top_k": 7}}'],
        ['--additional_config={"other": 1}', "--additional-conf", '{"kvrecall": {"top_k": 7}}'],
    ],
)
def test_a_second_additional_config_is_merged_and_wins(given: list[str]) -> None:
    made = serve_command("org/model", EXACT | {"top_k": 64, "sink_tokens": 8}, {}, [*given, "--seed", "3"])
    config = {"other": 1, "kvrecall": {"method": "exact", "top_k": 7, "sink_tokens": 8}}
    assert options(made.arguments)[-4:] == ["--additional-config", json.dumps(config), "--seed", "3"]
    assert made.config == config["kvrecall"] and made.settings.method.top_k == 7


def test_a_second_additional_config_wins_by_a_former_name() -> None:
    given = ["--additional-config", '{"kvrecall": {"rest": null}}']
    made = serve_command("org/model", EXACT | {"estimate": "page-means"}, {}, given)
    assert made.config == {"method": "exact", "estimate": None} and made.settings.method.estimate is None


@pytest.mark.parametrize(
    ("config", "given", "said"),
    [
        ({"method": "prkv"}, [], "Served are arkvale, exact, pariskv, pariskv-balanced"),
        ({"method": "exact", "top_kk": 3}, [], "Did you mean 'top_k'"),
        (EXACT, ["--additional-config", '{"kvrecall": {"method": "quest"}}'], "Served are"),
        (EXACT, ["--additional-config", '{"kvrecall": [1]}'], "an object"),
        (EXACT, ["--additional-config", "{"], "--additional-config: expected a JSON object"),
        (EXACT, ["--additional-config"], "--additional-config: expected a JSON object"),
        (EXACT, ["--additional-config.kvrecall.top_k", "3"], "one JSON object.*--set"),
        (EXACT, ["--config", "file.yaml"], "would ignore its"),
    ],
)
def test_what_is_not_served_is_refused(config: dict[str, Any], given: list[str], said: str) -> None:
    with pytest.raises(KVRecallError, match=said):
        serve_command("org/model", config, {}, given)


def test_another_attention_backend_serves_without_ours() -> None:
    for given in (["--attention-backend", "FLASH_ATTN"], ["--attention_backend=FLASH_ATTN"]):
        made = serve_command("org/model", {}, {}, given)
        assert not made.retrieves and "CUSTOM" not in made.arguments
    for name in ("custom", "KVRECALL"):
        assert serve_command("org/model", EXACT, {}, ["--attention-backend", name]).retrieves


def test_plugins_without_ours_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "other,kvrecall")
    serve_command("org/model", EXACT, {}, [])
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    with pytest.raises(ParameterError, match="VLLM_PLUGINS: expected a list with kvrecall"):
        serve_command("org/model", EXACT, {}, [])


@pytest.mark.parametrize("installed", [True, False])
def test_vllm_s_own_entry_point(installed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if not installed:
            raise PackageNotFoundError(name)
        return "0.32.0"

    python = tmp_path / "python"
    monkeypatch.setattr(command, "version", version)
    monkeypatch.setattr(sys, "executable", str(python))
    module = [str(python), "-P", "-m"]
    if not installed:
        assert start_of("m") == [*module, "vllm.entrypoints.openai.api_server", "--model", "m"]
        return
    assert start_of("m") == [*module, "vllm.entrypoints.cli.main", "serve", "m"]
    script = tmp_path / "vllm"
    script.touch(mode=0o755)
    assert start_of("m") == [str(script), "serve", "m"]

"""`kvrecall serve`: which engine, which command, and what is refused before anything starts."""

from __future__ import annotations

import json
import os
import shlex
import socket
from itertools import takewhile
from pathlib import Path

import pytest
import torch

from kvrecall.backends.vllm import dry_run
from kvrecall.cli import serve
from kvrecall.core import extras
from kvrecall.engine.memory import host_sequences
from kvrecall.step.settings import Settings
from tests.cli.conftest import Cli
from tests.engine.test_plan import LLAMA_8B

BOTH = {"vllm", "fastapi", "uvicorn", "transformers"}


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The packages that are found; a test may take some out."""
    found = set(BOTH)
    for module in (serve, extras):
        monkeypatch.setattr(module, "find_spec", lambda name: name in found or None)
    monkeypatch.setattr(os, "execvp", lambda *_: pytest.fail("something was started"))
    monkeypatch.setattr(dry_run, "rehearsed", lambda options: f"{options[0]} was not loaded")
    return found


def test_vllm_where_it_is_installed(cli: Cli, installed: set[str]) -> None:
    told = cli.json("serve", "org/model", "--method", "exact", "--set", "top_k=64", "--context", "32k", "--dry-run")
    assert told["engine"] == "vllm" and told["kvrecall"] == {"method": "exact", "top_k": 64}
    for name, value in (
        ("--attention-backend", "CUSTOM"), ("--block-size", "128"), ("--max-model-len", "32768"), ("--host", "127.0.0.1"),
        ("--port", "8000"), ("--additional-config", json.dumps({"kvrecall": told["kvrecall"]})),
    ):  # fmt: skip
        assert told["command"][told["command"].index(name) + 1] == value
    assert "--dtype" not in told["command"] and told["unchecked"] == "org/model was not loaded"
    served = cli.json("serve", "org/model", "--method", "exact@64", "--context", "32k", "--dry-run")
    assert served["command"] == told["command"]
    installed.remove("vllm")
    assert cli.json("serve", "org/model", "--dry-run")["engine"] == "transformers"


def test_what_stands_behind_two_dashes_is_handed_on(cli: Cli) -> None:
    given = ("--port", "9000", "-tp", "2", "--enable-prefix-caching")
    result = cli("serve", "org/model", "--method", "exact", "--port", 1, "--dry-run", "--", *given)
    command = shlex.split(result.stdout)
    assert "org/model was not loaded" in result.stderr.replace("\n", " ")
    assert tuple(command[-len(given) :]) == given and command.count("--port") == 1


def option(command: list[str], name: str) -> list[str]:
    """The values of an option, of all times that it stands there."""
    places = [i for i, text in enumerate(command) if text == name]
    return [value for i in places for value in takewhile(lambda text: not text.startswith("-"), command[i + 1 :])]


@pytest.mark.parametrize(("gpu", "sizes"), [(True, [1, 2, 4, *range(8, 65, 8)]), (False, [])])
def test_how_many_sequences_decode_together_follows_from_the_plan(
    gpu: bool, sizes: list[int], cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Host memory for 16 sequences of 32K tokens on each of two engines makes 64."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpu)
    LLAMA_8B.save_pretrained(tmp_path)
    told = host_sequences(
        LLAMA_8B, Settings.of({"kvrecall": {"host_memory": "128GiB"}}), context_tokens=32768, ranks=2, engines=2,
        dtype=torch.bfloat16,
    )  # fmt: skip
    assert told == 16
    ours = ("serve", tmp_path, "--context", "32k", "--set", "host_memory=128GiB", "--dry-run")
    made = cli(*ours, "--", "-tp", "2", "--data-parallel-size", "2")
    command = shlex.split(made.stdout)
    assert option(command, "--max-num-seqs") == ["64"] and "at most 64 sequences" in made.stderr.replace("\n", " ")
    assert [int(text) for text in option(command, "--cudagraph-capture-sizes")] == sizes
    chosen = shlex.split(cli(*ours, "--", "--max-num-seqs", "4").stdout)
    assert option(chosen, "--max-num-seqs") == ["4"]
    assert option(chosen, "--cudagraph-capture-sizes") == (["1", "2", "4"] if gpu else [])
    eager = shlex.split(cli(*ours, "--", "--enforce-eager").stdout)
    assert option(eager, "--max-num-seqs") and not option(eager, "--cudagraph-capture-sizes")


def test_a_model_that_is_not_here_decodes_64_sequences_together(cli: Cli) -> None:
    told = cli.json("serve", "org/model", "--method", "exact", "--context", "32k", "--dry-run")
    assert option(told["command"], "--max-num-seqs") == ["64"]
    other = cli("serve", "org/model", "--dry-run", "--", "--attention-backend", "FLASH_ATTN")
    assert not option(shlex.split(other.stdout), "--max-num-seqs")


def test_vllm_takes_the_place_of_this_process(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    class Replaced(BaseException):
        pass

    def execvp(program: str, arguments: list[str]) -> None:
        assert program == arguments[0] and "org/model" in arguments
        raise Replaced

    monkeypatch.setattr(os, "execvp", execvp)
    with pytest.raises(Replaced):
        raise cli("serve", "org/model", "--method", "exact").exception or AssertionError


def test_another_attention_backend_is_said_to_be_without_kvrecall(cli: Cli) -> None:
    result = cli("serve", "org/model", "--dry-run", "--", "--attention-backend", "FLASH_ATTN")
    assert result.exit_code == 0 and "serves without kvrecall" in result.stderr.replace("\n", " ")


@pytest.mark.parametrize(
    ("missing", "args", "said"),
    [
        ({"vllm", "fastapi"}, [], ['".[vllm]"', '".[serve]"', "got 'neither'"]),
        ({"vllm"}, ["--engine", "vllm"], ['".[vllm]"']),
        ({"uvicorn"}, ["--engine", "transformers"], ['".[serve]"', "no module 'uvicorn'"]),
        ({"transformers", "vllm"}, ["--engine", "transformers"], ['".[transformers]"']),
    ],
)
def test_what_is_not_installed_is_named_with_its_remedy(
    cli: Cli, installed: set[str], missing: set[str], args: list[str], said: list[str]
) -> None:
    installed -= missing
    error = cli.error("serve", "org/model", *args, "--method", "exact")
    assert all(text in error for text in said)


VLLM = ("--engine", "vllm", "--method", "exact")
TRANSFORMERS = ("--engine", "transformers")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["org/model", "--engine", "vllm", "--method", "prkv"], "Served are arkvale, exact, pariskv, pariskv-balanced"),
        (["org/model", *VLLM, "--set", "top_k"], "--set"),
        (["org/model", *VLLM, "--device", "cuda:1"], "CUDA_VISIBLE_DEVICES"),
        (["org/model", *VLLM, "--context", "many"], "--context"),
        (["org/model", "another", *VLLM], "options behind `--`"),
        (["smollm2-135m", *VLLM], "--engine transformers"),
        (["org/model", *TRANSFORMERS, "--method", "parisk"], "Did you mean"),
        (["org/model", *VLLM, "--session", "report=folder"], "none with --engine vllm"),
        (["org/model", *VLLM, "--prefix-memory", "4g"], "none with --engine vllm"),
        (["org/model", *TRANSFORMERS, "--session", "folder"], "NAME=FOLDER"),
        (["org/model", *TRANSFORMERS, "--session", "org/model=folder"], "another name than the model's"),
        (["org/model", *TRANSFORMERS, "--prefix-memory", "much"], "--prefix-memory"),
        (["org/model", *TRANSFORMERS, "--", "--compile"], "They are vLLM's"),
    ],
)
def test_mistakes(cli: Cli, args: list[str], said: str) -> None:
    if "--" not in args:
        assert said in cli.error("serve", *args)
    result = cli("serve", *args)
    assert result.exit_code == 2 and said in result.stderr and not result.stdout


def test_a_running_server_has_no_json(cli: Cli) -> None:
    assert "--dry-run with it" in cli.json("serve", "org/model", *VLLM, exit_code=2)["error"]["message"]


def test_a_server_on_transformers_is_told(cli: Cli) -> None:
    asked = (
        "serve",
        "smollm2-135m",
        *TRANSFORMERS,
        "--set",
        "top_k=64",
        "--port",
        9000,
        "--session",
        "report=a/b",
        "--dry-run",
    )
    told = cli.json(*asked)
    assert told["method"] == "pariskv-balanced" and told["port"] == 9000 and told["sessions"] == {"report": "a/b"}
    result = cli(*asked)
    assert "http://127.0.0.1:9000/v1, in this process" in result.stderr.replace("\n", " ") and not result.stdout


def test_a_used_port_is_told_before_the_model_is_loaded(cli: Cli) -> None:
    with socket.create_server(("127.0.0.1", 0)) as used:
        result = cli("serve", "no/model", *TRANSFORMERS, "--port", used.getsockname()[1])
    assert result.exit_code == 2 and "give another --port" in result.stderr.replace("\n", " ") and not result.stdout

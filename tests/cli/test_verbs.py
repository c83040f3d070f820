"""Help, plan, info, models; and what happens to errors, interruptions and chatty libraries in any verb."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvrecall import cli as package
from kvrecall import engine, models
from kvrecall.cli.screen import seconds, size
from kvrecall.core.errors import ModelFilesError
from tests.cli.conftest import Cli

VERBS = [
    "ask",
    "chat",
    "read",
    "generate",
    "serve",
    "demo",
    "eval",
    "report",
    "tune",
    "plan",
    "info",
    "models",
    "models list",
    "models pull",
    "models check",
    "models rm",
    "sessions",
    "sessions list",
    "sessions rm",
]


@pytest.mark.parametrize("verb", VERBS)
def test_help(cli: Cli, verb: str) -> None:
    result = cli(*verb.split(), "--help")
    assert result.exit_code == 0 and "Usage:" in result.output
    assert verb in ("models", "sessions") or "--json" in result.output


def test_bare_command_shows_the_verbs(cli: Cli) -> None:
    assert all(verb.split()[0] in cli().output for verb in VERBS)


def test_plan(cli: Cli, tiny: Path) -> None:
    told = cli.json("plan", "--context", "128k", "--batch", 2, "--method", "full")
    assert told["context_tokens"] == 131072 and told["batch"] == 2 and told["summary_bytes"] == 0
    assert cli.json("plan", "--context", "128k")["summary_bytes"] > 0
    shown = cli("plan", "-m", tiny, "--context", "1_000").stdout
    assert "1,000 tokens" in shown and "full attention" in shown and "available" in shown and "yes; the longest" in shown


def test_plan_for_a_gpu_that_is_not_here(cli: Cli, tiny: Path) -> None:
    """It holds weights, a chunk's activations and the cache; the longest context and most sequences are those that fit."""
    asked = ["plan", "-m", tiny, "--batch", 2, "--device-memory"]
    told = cli.json(*asked, "24GiB", "--context", "8k")
    assert told["fits_device"] and told["available_device_bytes"] == 24 << 30 and told["longest_context"] == 16384
    beside = told["weight_bytes"] + told["activation_bytes"]
    tight = beside + told["device_bytes"]
    assert cli.json(*asked, tight, "--context", "8k")["fits_device"]
    small = cli.json(*asked, tight - 1, "--context", "8k")
    assert not small["fits_device"] and 0 < small["longest_context"] < 8192 and small["most_sequences"] == 1
    longest = small["longest_context"]
    assert cli.json(*asked, tight - 1, "--context", longest)["fits_device"]
    assert not cli.json(*asked, tight - 1, "--context", longest + 1)["fits_device"]
    assert "NO; the longest context is" in cli(*asked, tight - 1, "--context", "8k").stdout
    assert "NO: the model and one token do not" in cli(*asked, 1 << 16).stdout


def test_plan_of_vllm(cli: Cli, tiny: Path) -> None:
    asked = ["plan", "-m", tiny, "--context", "1_000", "--engine", "vllm", "--host-memory", "1GiB", "--device-memory", "1GiB"]
    told = cli.json(*asked)
    assert told["method"] == "pariskv-balanced" and told["blocks"] == told["host_blocks"] + told["blocks_on_device"] > 0
    shown = cli(*asked).stdout
    assert "blocks" in shown and "yes" in shown and "draft" not in shown
    drafted = [*asked, "--num-speculative-tokens", 3]
    assert cli.json(*drafted)["scratch_bytes"] > told["scratch_bytes"] and "3 tokens per sequence" in cli(*drafted).stdout
    assert "--engine vllm" in cli.error("plan", "--num-speculative-tokens", 3)
    assert "--engine vllm" in cli.error("plan", "--host-memory", "1GiB")


def test_plan_of_rows_in_eight_bits(cli: Cli, tiny: Path) -> None:
    asked = ["plan", "-m", tiny, "--context", "1_000"]
    plain, small = (cli.json(*asked, *form) for form in ((), ("--host-rows", "fp8")))
    assert small["host_bytes"] < 0.6 * plain["host_bytes"] and small["device_bytes"] == plain["device_bytes"]
    assert "in eight bits" in cli(*asked, "--host-rows", "fp8").stdout and "in eight" not in cli(*asked).stdout
    assert "--host-rows: expected plain with vLLM, got 'fp8'" in cli.error(*asked, "--host-rows", "fp8", "--engine", "vllm")


@pytest.mark.parametrize("context", ["0", "-5", "many", "1.5k", "k", ""])
def test_plan_of_something_that_is_no_count(cli: Cli, context: str) -> None:
    assert "--context: expected a count such as 32768, 32k or 1m" in cli.error("plan", f"--context={context}")


def test_info(cli: Cli) -> None:
    told = cli.json("info")
    assert told["versions"]["torch"] and told["devices"][0]["device"] == "cpu"
    assert {"pariskv", "full"} <= {m["name"] for m in told["methods"]} and len(told["models"]) == len(models.KNOWN)
    shown = cli("info").stdout
    assert "pariskv" in shown and "transformers" in shown and "not fetched" in shown


@pytest.mark.parametrize(
    ("capability", "said"), [((8, 0), "binary"), ((9, 0), "binary"), ((10, 0), "integer"), ((7, 5), "torch")]
)
def test_info_says_what_searches_run_on(capability: tuple[int, int], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="Triton is only there on Linux")
    from kvrecall.cli.info import _kernels

    monkeypatch.setattr("kvrecall.core.launch.kernels_available", lambda _: capability >= (8, 0))
    monkeypatch.setattr("kvrecall.index.sphere.kernels.search.capability", lambda _: capability)
    monkeypatch.setattr("kvrecall.index.sphere.kernels.search.INTERPRETED", False)
    assert said in _kernels(torch.device("cuda", 0))


def test_models_without_any(cli: Cli) -> None:
    assert all(row["state"] == "not fetched" and row["path"] is None for row in cli.json("models", "list")["models"])
    assert "(default)" in cli("models", "list").stdout
    assert cli.json("models", "check") == {"models": []} and "no models here" in cli("models", "check").stderr
    assert "kvrecall models pull smollm2-135m" in cli.error("models", "check", "smollm2-135m")
    assert "unknown model 'x'" in cli.error("models", "pull", "x")


def test_models_pull_and_check_report_paths(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    path = models.models_dir() / "w.gguf"
    monkeypatch.setattr(models, "pull", lambda name, on_notice: path)
    told = cli.json("models", "pull", "smollm2-135m")["models"][0]
    assert told["path"] == str(path) and told["fetched"] is True
    assert "fetched and verified" in cli("models", "pull").stdout
    monkeypatch.setattr(models, "check", lambda name: path)
    assert cli.json("models", "check", "smollm2-135m")["models"] == [{"name": "smollm2-135m", "path": str(path), "ok": True}]


def test_damaged_model_is_shown_and_fails_the_check(cli: Cli) -> None:
    models.models_dir().mkdir()
    (models.models_dir() / models.KNOWN["smollm2-135m"].file).write_bytes(b"GGUF")
    assert "damaged" in cli("models", "list").stdout
    assert re.search(r"has 4 bytes.* expected 98,362,432.* Run `kvrecall models rm smollm2-135m`", cli.error("models", "check"))


def test_models_and_their_unpacked_copies_are_counted_and_deleted(cli: Cli) -> None:
    name, folder = "smollm2-135m", models.models_dir()
    file = folder / models.KNOWN[name].file
    hashes = {file.stem: models.KNOWN[name].sha256[:12], "another": "0a" * 6}
    copies = [folder / "unpacked" / f"{stem}-{digest}-float32" for stem, digest in hashes.items()]
    for copy in copies:
        copy.mkdir(parents=True)
        (copy / "weights").write_bytes(b"0" * 3000)
    file.write_bytes(b"GGUF")
    row = next(row for row in cli.json("models", "list")["models"] if row["name"] == name)
    assert row["unpacked_bytes"] == 3000 and "2.9 KiB" in cli("models", "list").stdout
    assert "unknown model 'x'" in cli.error("models", "rm", name, "x") and file.exists() and copies[0].exists()
    assert cli.json("models", "rm", name, "--unpacked")["models"] == [{"name": name, "bytes": 3000}]
    assert file.exists() and not copies[0].exists()
    assert "4 B freed" in cli("models", "rm", name).stdout and not file.exists() and copies[1].exists()
    assert cli.json("models", "rm", name)["models"] == [{"name": name, "bytes": 0}]
    assert cli.json("models", "list")["unpacked_bytes"] == 3000
    assert "unpacked copies, of other files too: 2.9 KiB" in cli("models", "list").stdout
    assert "NAMES: expected a known name, or --unpacked" in cli.error("models", "rm") and copies[1].exists()
    assert "all unpacked copies: 2.9 KiB freed" in cli("models", "rm", "--unpacked").stdout and not copies[1].exists()


def test_interruption_exits_130_without_a_traceback(cli: Cli, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "generate", interrupted)
    for extra in ((), ("--json",)):
        result = cli("generate", "boat", "-m", tiny, *extra)
        assert result.exit_code == 130 and result.stdout == "" and result.stderr == "interrupted\n"


def test_what_libraries_print_does_not_reach_json(cli: Cli, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = models.load

    def chatty(*args: object, **kwargs: object) -> object:
        print("look at me")
        return load(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(models, "load", chatty)
    assert cli.json("generate", "boat", "-m", tiny, "--max-new-tokens", 1)["new_tokens"] == 1


def test_mistakes_of_ours_are_not_hidden(cli: Cli, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(models, "load", broken)
    assert isinstance(cli("generate", "boat", "-m", tiny).exception, ZeroDivisionError)


def test_exhausted_device_memory_is_one_line(cli: Cli, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    def exhausted(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(engine, "generate", exhausted)
    assert "device memory is exhausted" in cli.error("generate", "boat", "-m", tiny)


def test_brackets_in_messages_are_not_markup(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise ModelFilesError("m", "needs gguf", 'Run `pip install ".[demo]"`.')

    monkeypatch.setattr(models, "load_config", fails)
    assert ".[demo]" in cli.error("plan")


def test_script_without_typer_says_what_to_install(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in [name for name in sys.modules if name.startswith("kvrecall.cli.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "typer", None)
    with pytest.raises(SystemExit) as caught:
        package.main()
    assert caught.value.code == 2 and 'pip install ".[cli]"' in capsys.readouterr().err


def test_script_runs_as_a_process() -> None:
    code = "import sys; sys.argv = ['kvrecall', 'plan', '--json']; from kvrecall.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.startswith("{") and done.stdout.count("\n") == 1


@pytest.mark.parametrize(
    "call", [("--help",), ("statistics", "--help"), ("serve", "--help"), ("eval", "--tasks", "list")], ids=" ".join
)
def test_what_computes_nothing_does_not_wait_for_torch(call: tuple[str, ...]) -> None:
    code = "import sys; sys.modules['torch'] = None; from kvrecall.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code, *call], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout and not done.stderr


def test_sizes_and_times() -> None:
    assert [size(n) for n in (0, 1023, 1536, 5 << 20, 3 << 40, None)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "5.0 MiB",
        "3.0 TiB",
        "unknown",
    ]
    assert [seconds(t) for t in (0.0031, 12.34)] == ["3.1 ms", "12.3 s"]

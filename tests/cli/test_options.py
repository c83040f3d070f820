"""Values that no option can have, and what reaches a terminal."""

from __future__ import annotations

import sys
import unicodedata
from pathlib import Path

import pytest

from kvrecall import models
from kvrecall.cli.screen import plain_table, printable, results
from tests.cli.conftest import Cli

ABSURD = [
    "-1",
    "0",
    "9" * 30,
    "1e400",
    "nan",
    "inf",
    "",
    "²",
    "/nonexistent/x",
    "x" * 5000,
    "\x1b[31m",
    "a\nb",
    "[/red]",
    "[[[[",
]
VERBS = {
    "generate": ["--method", "--set", "--dtype", "--device", "--max-new-tokens", "--chunk-tokens", "--temperature", "--seed"],
    "plan": ["--context", "--method", "--set", "--batch", "--dtype", "-m"],
    "recall": ["--method", "--set", "--truth", "--window"],
    "eval": ["--tasks", "--methods", "--budgets", "--context", "--depths", "--temperature", "--top-p", "--shard", "-m"],
    "tune": ["--mass", "--floor", "--tokens", "--steps", "--stride", "--out"],
    "trigger-threshold": ["--stride", "--tokens", "--compare", "--max-stride", "--out"],
    "trace": ["--tokens", "--steps", "--layers", "--continue", "--observe"],
}


@pytest.mark.parametrize("verb", VERBS)
def test_absurd_values_are_results_or_one_line(
    cli: Cli, tiny: Path, document: Path, tmp_path: Path, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is not refused before a model is loaded comes to the model that is missing here."""

    def missing(*_: object, **__: object) -> None:
        raise models.load_error  # type: ignore[attr-defined]

    from kvrecall.core.errors import ModelFilesError

    monkeypatch.setattr(models, "load_error", ModelFilesError("m", "missing", "Fetch it."), raising=False)
    monkeypatch.setattr(models, "load", missing)
    monkeypatch.chdir(tmp_path)
    calls: dict[str, tuple[object, ...]] = {
        "generate": ("generate", "boat", "-m", tiny), "plan": ("plan", "-m", tiny), "recall": ("recall", "none"),
        "eval": ("eval", "-m", tiny, "--out", tmp_path / "run"), "tune": ("tune", "--text", document, "-m", tiny),
        "trigger-threshold": ("trigger-threshold", document, "-m", tiny),
        "trace": ("trace", tmp_path / "t", document, "-m", tiny),
    }  # fmt: skip
    for option in VERBS[verb]:
        for value in ABSURD:
            result = cli(*calls[verb], option, value)
            told = option, value[:20], result.output[-300:]
            assert result.exception is None or isinstance(result.exception, SystemExit), (*told, repr(result.exception))
            assert result.exit_code in (0, 2) and "Traceback" not in result.output and "\x1b" not in result.output, told


def test_temperatures_that_are_none(cli: Cli, tiny: Path, document: Path) -> None:
    for call in (("generate", "boat"), ("ask", document, "what")):
        assert "--temperature: expected a finite number >= 0" in cli.error(*call, "-m", tiny, "--temperature", "inf")
        assert cli(*call, "-m", tiny, "--temperature", "nan").exit_code == 2


def test_an_answer_that_is_too_long_is_told_by_its_own_option(cli: Cli, tiny: Path) -> None:
    said = cli.error("generate", "boat", "-m", tiny, "--max-new-tokens", 10**8)
    assert "--max-new-tokens: expected fewer than the 16,384 tokens of the model's context, got 100000000" in said


def test_a_table_in_two_forms_is_refused(cli: Cli, tmp_path: Path) -> None:
    assert (
        "--markdown: expected no --json with it" in cli.json("recall", tmp_path, "--markdown", exit_code=2)["error"]["message"]
    )


def test_plans_say_where_a_model_ends(cli: Cli, tiny: Path) -> None:
    assert "contexts of up to 16,384 tokens" in cli("plan", "-m", tiny, "--context", "32k").stderr
    assert "contexts of up to" not in cli("plan", "-m", tiny, "--context", "16k").stderr
    assert cli.json("plan", "-m", tiny)["model_context_tokens"] == 16384
    assert "from 1 on, got '0'. Give a whole number of tokens." in cli.error("plan", "--context", "0")


def test_nothing_of_unicode_that_steers_a_terminal_is_printed() -> None:
    everything = "".join(map(chr, range(sys.maxunicode + 1)))
    left = printable(everything)
    assert {c for c in left if unicodedata.category(c)[0] == "C"} == {"\n", "\t"}
    assert not set(left) & set("\u2028\u2029\u202e\u2066\u200f\x9b\x9d\x1b")
    dropped = set(everything) - set(left)
    assert all(unicodedata.category(c)[0] == "C" or c in "\u2028\u2029" for c in dropped)


def test_names_in_tables_and_messages_are_text(capsys: pytest.CaptureFixture[str], cli: Cli) -> None:
    table = plain_table(None, "name")
    table.add_row("[red]a[/blue]\x1b[2J\x9b")
    results().print(table)
    assert "[red]a[/blue][2J" in capsys.readouterr().out
    assert "\x1b" not in cli("report", "x\x1b[2J\u202ey").stderr

"""Tables in a log of 80 columns, and what a verb that takes long says where there is no terminal."""

from __future__ import annotations

import io
from collections import Counter
from pathlib import Path

import pytest

from kvrecall.cli import eval as eval_verb
from kvrecall.cli import screen
from kvrecall.cli.eval import show
from kvrecall.cli.screen import ProgressLog, Screen, plain_table
from kvrecall.evaluate.summary import Row
from tests.cli.conftest import Cli

WIDTH = 80


def printed(table: object, width: int = WIDTH) -> list[str]:
    out = io.StringIO()
    Screen(file=out, width=width, highlight=False).print(table)
    return [line.rstrip() for line in out.getvalue().splitlines()]


@pytest.mark.parametrize("columns, parts", [(3, 1), (12, 4), (40, 14)])
def test_a_wide_table_goes_on_below_with_every_cell_whole(columns: int, parts: int) -> None:
    table = plain_table("title", "layer", *(f"column {n:02} of many" for n in range(columns)))
    rows = [[str(row), *(f"cell-{row}-{n}" for n in range(columns))] for row in range(5)]
    for row in rows:
        table.add_row(*row)
    lines = printed(table)
    assert max(map(len, lines)) <= WIDTH and lines.count("title") == 1
    assert sum(line.startswith("layer") for line in lines) == parts and len(lines) == 1 + 6 * parts + parts - 1
    words = Counter(" ".join(lines).split())
    assert all(words[cell] == 1 for row in rows for cell in row[1:]) and words["many"] == columns


def test_prose_is_wrapped_between_words_and_names_are_not() -> None:
    table = plain_table(None, "name", "state", "what it is", prose=True)
    table.add_row("a-name-of-twenty-five-let", "not fetched", "some words about it " * 5)
    lines = printed(table)
    assert (
        len(lines) == 4
        and max(map(len, lines)) <= WIDTH
        and lines[1].startswith("a-name-of-twenty-five-let  not fetched  some words")
    )


def test_pieces_stay_whole() -> None:
    table = plain_table()
    table.add_pieces("stages", [f"stage number {n} 1.5 s" for n in range(6)])
    lines = printed(table)
    assert len(lines) == 3 and all(line.count("stage number") == 2 for line in lines) and lines[0].startswith("stages  stage")


def rows(method: str) -> list[Row]:
    values = {"samples": 200, "score": 0.93, "low": 0.87, "high": 0.99, "interval": "wilson", "difference": -0.012}
    values |= {"attended_tokens": 12345.0, "estimated_units": 2048.0, "decode_ms": 1234.5, "pass_at_k": {}}
    return [
        Row(task=task, context=131072, condition=name, method=name, budget=None if name == "full" else 1024, **values)  # type: ignore[arg-type]
        for task in ("variable-tracking", "niah")
        for name in ("full", method, "louiskv")
    ]


@pytest.mark.parametrize("method", ["pariskv", "pariskv-balanced:estimate=page-means;update_interval=64"])
def test_scores_fit_80_columns(method: str, capsys: pytest.CaptureFixture[str]) -> None:
    show(rows(method))
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert max(map(len, lines)) <= WIDTH and "…" not in "".join(lines).replace("0.870…0.990", "")
    assert sum("0.870…0.990 w" in line and "12,345 + 2,048" in line for line in lines) in (0, 6)
    assert method in "\n".join(lines) and "variable-tracking, 131,072 tokens" in lines


def test_verbs_fit_80_columns(cli: Cli, tiny: Path, document: Path, tmp_path: Path) -> None:
    trace = tmp_path / "t.safetensors"
    assert cli("trace", trace, document, "-m", tiny, "--tokens", 700, "--steps", 3).exit_code == 0
    calls = (
        ("info",), ("models", "list"), ("plan", "-m", tiny, "--context", "1m"), ("recall", trace, "--set", "top_k=8"),
        ("eval", "--tasks", "list"),
    )  # fmt: skip
    for call in calls:
        shown = cli(*call)
        assert shown.exit_code == 0, shown.output
        lines = shown.stdout.split("\n\nfolder")[0].splitlines()
        assert max(map(len, lines)) <= WIDTH and "…" not in shown.stdout, (call, shown.stdout)
    for heading in ("coarse recall", "zone mass ÷ exact", "bytes moved"):
        assert heading in cli("recall", trace, "--set", "top_k=8").stdout
    asked = cli("ask", document, "what", "-m", tiny, "--max-new-tokens", 3, "--stats")
    lines = asked.stderr.splitlines()
    assert "computed statistics" not in asked.stderr  # the trace has told of them
    assert max(map(len, lines)) <= WIDTH and "estimate=page-means · update_interval=64" in asked.stderr


def test_a_log_has_a_line_per_finished_cell(cli: Cli, tiny: Path, tmp_path: Path) -> None:
    call = ("eval", "-m", tiny, "--tasks", "niah", "--methods", "exact", "--budgets", "32", "--context", "600,700",
            "--samples", 1, "--depths", "0,50", "--out", tmp_path / "run")  # fmt: skip
    lines = [line for line in cli(*call).stderr.splitlines() if line.startswith("[")]
    assert [line.split(": score")[0] for line in lines] == [
        "[3/8] niah 600 full", "[4/8] niah 600 exact@32", "[7/8] niah 700 full", "[8/8] niah 700 exact@32",
    ]  # fmt: skip
    assert all(" of 2, 0:00:" in line for line in lines)
    assert "[" not in cli(*call).stderr  # nothing was missing


def test_what_takes_long_tells_so_and_what_is_quick_does_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr(screen.time, "perf_counter", lambda: now[0])
    with screen.token_bar("reading") as on_progress:
        for done in range(0, 1001, 100):
            now[0] += 2.0
            on_progress(done, 1000)
    assert capsys.readouterr().err == ""
    with screen.token_bar("reading") as on_progress:
        for done in range(0, 4001, 1000):
            now[0] += 20.0
            on_progress(done, 4000)
    said = [("1,000", "0:00:40, about 0:01:00 left"), ("3,000", "0:01:20, about 0:00:20 left"), ("4,000", "0:01:40")]
    assert capsys.readouterr().err.splitlines() == [f"reading: {done} of 4,000, {at}" for done, at in said]
    estimate, left = screen.Estimate(), {}
    for done in (2000, 3000, 5000, 8000, 10000):  # of which 2,000 were there
        now[0] = 7 + 1e-3 * (done - 2000) + 1e-6 * (done**2 - 2000**2)
        left[done] = estimate.left(done, 10000)
    assert left[2000] is None and left[10000] is None and left[3000] == pytest.approx(7 * (1 + 5))  # as much for each
    assert left[5000] == pytest.approx(5 + 75) and left[8000] == pytest.approx(2 + 36)
    quiet = ProgressLog(quiet=True)
    quiet.print(lambda: "no", always=True)
    assert capsys.readouterr().err == "" and eval_verb.ProgressLog is ProgressLog

"""notebook/results.md: its tables are those of the committed rows, and only equal samples are compared."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scripts.results import DEFAULT_MODEL, read_plan
from scripts.results_tables import PAGE, page
from scripts.tables.common import ROOT
from scripts.tables.evaluation.cases import FULL, comparisons, pool
from scripts.tables.evaluation.figures import draw
from scripts.tables.evaluation.pages import TABLES
from scripts.tables.evaluation.rows import FOLDER, Answer, Rows

PLAN: dict[str, Any] = {
    "methods": {"One": "one@8", "Two": "{model}/two@8"},
    "sets": {"tasks": ["copy", "json-kv"], "both": ["One", "Two"]},
    "comparisons": {"systems": ["One", "Two"], "baselines": ["One", "Two"]},
    "wanted": {"One": 1},
    "depths": [0],
    "seed": 0,
    "stages": [
        {"name": "small", "tasks": "tasks", "methods": "both", "contexts": [1024], "samples": 2},
        {"name": "long", "tasks": ["drift:text"], "methods": "both", "contexts": [1024], "steps": 4},
        {"name": "trial", "lane": "trial", "tasks": "tasks", "methods": "both", "contexts": [1024], "samples": 1},
    ],
}
CONDITIONS: dict[str, Any] = {"full": {}, "one@8": {"k": 8}}
CONFIG = {"model": "m", "seed": 0, "tasks": ["copy"], "contexts": [1024], "samples": 2, "conditions": CONDITIONS}


def answer(method: str, task: str, sample: int, score: float, run: str = "small") -> Answer:
    budget = None if method == FULL[0] else 8
    return Answer("m", run, 1024, task, sample, None, method, budget, score, 40.0 if budget is None else 10.0)


def at(place: tuple[str, int], *held: Answer) -> list[Answer]:
    """The same answers elsewhere."""
    return [replace(each, model=place[0], context=place[1]) for each in held]


def record(condition: str, sample: int, score: float, task: str = "copy") -> dict[str, Any]:
    own = {"task": task, "context": 1024, "sample": sample, "attempt": 0, "condition": condition, "method": condition}
    own |= {"attended_tokens": 40.04 if condition == "full" else 10.04, "estimated_units": 2.06}
    return own | {"budget": None if condition == "full" else 8, "score": score}


def packed(path: Path, *runs: tuple[str, dict[str, Any], list[dict[str, Any]]]) -> Path:
    with gzip.open(path, "wt") as file:
        for run, config, records in runs:
            file.write("".join(json.dumps(held) + "\n" for held in [{"run": run, "config": config}, *records]))
    return path


def test_the_page_and_its_figures_are_those_of_the_rows() -> None:
    rows = Rows(read_plan())
    text = PAGE.read_text(encoding="utf-8")
    assert page(rows) == text, "run `python -m scripts.results_tables --write`"
    shown = {part.partition(")")[0] for part in text.split("(figures/")[1:]}
    assert shown == {file.name for file in (ROOT / "notebook" / "figures").glob("results_*.svg")}
    assert sum(file.stat().st_size for file in FOLDER.glob("evaluation_*")) < 2_000_000


def test_only_samples_that_all_have_are_compared() -> None:
    held = [answer(FULL[0], "copy", n, 1.0) for n in range(4)] + [answer(FULL[0], "json-kv", 0, 0.5)]
    held += [answer("One", "copy", n, float(n < 2)) for n in range(4)] + [answer("One", "json-kv", 0, 0.25)]
    held += [answer("Two", "copy", 0, 0.0)]
    main, fewer = comparisons(pool(held), [("One", 8), ("Two", 8), ("Three", 8)])
    assert main.columns == (FULL, ("One", 8)) and {t: len(c) for t, c in main.tasks.items()} == {"copy": 4, "json-kv": 1}
    full, one = main.lines()
    assert full.average.value == 75 and full.difference == (0, 0, 0)
    assert one.tasks == {"copy": 50, "json-kv": 25} and one.average.value == 37.5 and one.difference.value == -37.5
    assert one.difference.low < -37.5 < one.difference.high  # of copy alone: one sample has no spread
    assert fewer.columns == (FULL, ("Two", 8)) and fewer.tasks == {"copy": [("copy", 0, None)]}
    assert fewer.lines()[1].difference.value == -100
    assert comparisons(pool(held[5:]), [("One", 8)]) == []  # nothing without full attention


def test_every_method_is_shown_on_all_of_its_own_samples_below_those_that_all_have(tmp_path: Path) -> None:
    names = [f"M{n}" for n in range(6)]
    rows = Rows(PLAN | {"methods": {n: f"{n}@8" for n in names}, "comparisons": {"baselines": names}}, tmp_path)
    rows.answers = [answer(m, "copy", 0, 1.0) for m in (FULL[0], *names)]
    assert TABLES["baselines"](rows).count("**m, 1K") == 1  # all have the same, so there is nothing more to show
    rows.answers += [answer(FULL[0], "json-kv", n, 1.0) for n in (0, 1)]
    rows.answers += [answer("M0", "json-kv", 0, 0.0), replace(answer("M0", "json-kv", 1, 0.5), estimated_units=9.0)]
    common, own = TABLES["baselines"](rows).split("**m, 1K, all samples of each method.**")
    assert "1 samples: 1 of copy." in common and "json-kv" not in common and "| M0 | 8 | 100.0 [100.0, 100.0] |" in common
    assert "| M0 | 8 | 3 | 2 | 62.5 [50.0, 75.0] | −37.5 [−50.0, −25.0] | 10 + 9 |" in own  # of one pair, the page shows it
    assert "| M1 | 8 | 1 | 1 | 100.0 [100.0, 100.0] | 0.0 [0.0, 0.0] | 10 |" in own


def test_orders_are_those_of_the_most_methods_then_the_default_model_at_its_longest_context(tmp_path: Path) -> None:
    names = ["PRKV", "ShadowKV", "ArkVale", "Quest"]
    rows = Rows(PLAN | {"methods": {n: f"{n}@8" for n in names}, "comparisons": {"baselines": names}}, tmp_path)
    four = [answer(m, "copy", 0, 1.0) for m in (FULL[0], *names)]
    small, short, long = ("qwen2.5-coder-0.5b", 16384), (DEFAULT_MODEL, 4096), (DEFAULT_MODEL, 8192)
    rows.answers = at(small, *four) + at(short, *four[:-1])
    assert "| qwen2.5-coder-0.5b, 16K: − full |" in TABLES["order"](rows)
    rows.answers += at(long, *four) + at(short, four[-1])
    assert TABLES["order"](rows).count(f"| {DEFAULT_MODEL}, 8K: − full |") == TABLES["order"](rows).count("| method |") == 1


def test_what_attends_to_everything_has_not_reached_a_target(tmp_path: Path) -> None:
    rows = Rows(PLAN, tmp_path)
    rows.answers = [answer(FULL[0], "copy", n, 1.0) for n in (0, 1)] + [answer("One", "copy", n, 1.0) for n in (0, 1)]
    assert "| One | 8 | 2 |" in TABLES["targets"](rows) and "attends to all" not in TABLES["overview"](rows)
    rows.answers[-1] = replace(rows.answers[-1], attended_tokens=40.0)
    assert "| One | 8 | 2 |" in TABLES["targets"](rows)  # but not in all samples
    rows.answers[-2] = replace(rows.answers[-2], attended_tokens=40.0)
    assert TABLES["targets"](rows) == "Nothing yet."
    assert "| One | 8 | 0.0 [0.0, 0.0], attends to all |" in TABLES["overview"](rows)
    rows.answers = [replace(each, attended_tokens=None) for each in rows.answers]  # nobody knows
    assert "| One | 8 | 2 |" in TABLES["targets"](rows)


def test_an_interval_of_two_samples_is_as_wide_as_their_standard_error_says() -> None:
    """Half of all resamples of one out of two are each of them, so the bootstrap's deviation is theirs, |a - b| / 2."""
    held = [answer(m, "copy", n, s) for m, s in ((FULL[0], 1.0), ("One", 1.0)) for n in (0, 1)]
    held[3] = answer("One", "copy", 1, 0.0)
    (found,) = comparisons(pool(held), [("One", 8)])
    assert found.lines()[1].average == (50, 0, 100)


def test_rows_are_taken_from_packed_samples_and_read_again(tmp_path: Path) -> None:
    step = {"steps": 2, "agreement": 0.9, "kl": 0.125}
    windows = [{"first_step": 0, "recall": 0.5} | step, {"first_step": 2, "recall": None} | step]
    drifted = record("one@8", 0, 0.9, "drift:text") | {"windows": windows}
    file = packed(
        tmp_path / "a.gz",
        ("small", CONFIG, [record("full", 0, 1.0), record("one@8", 0, 1 / 3), record("three@8", 0, 1.0)]),
        ("long", CONFIG, [drifted]), ("trial", CONFIG, [record("full", 0, 1.0)]), ("other", CONFIG, [record("full", 0, 1.0)]),
    )  # fmt: skip
    rows = Rows(PLAN, tmp_path)
    told = rows.add(file)
    assert "3 samples; without a name there: ['three@8']" in told[0] and "left out" in told[2] and "left out" in told[3]
    rows.write()
    again = Rows(PLAN, tmp_path)
    assert (again.answers, again.windows, again.runs) == (rows.answers, rows.windows, rows.runs)
    assert {a.estimated_units for a in again.answers} == {2.1}
    assert [(a.method, a.score, a.attended_tokens) for a in again.answers] == [(FULL[0], 1.0, 40.0), ("One", 0.3333, 10.0)]
    assert [(w.method, w.first_step, w.recall) for w in again.windows] == [("One", 0, 0.5), ("One", 2, None)]
    texts = {name: make(again) for name, make in TABLES.items()}
    assert "| small | m | 1K | 2 of 12 |" in texts["made"] and "| long | m | 1K | 1 of 3 |" in texts["made"]
    assert "| One | 8 | −66.7 [−66.7, −66.7] |" in texts["overview"] and "| no |" in texts["targets"]
    assert "| One (8) | 4 | 50.0 | 50.0 | 0.0 | 90.0 | 0.1250 |" in texts["generation"]
    assert draw(again, tmp_path) == ["results_recall_m_1k.svg", "results_kl_m_1k.svg"]


def test_a_run_grows_with_equal_settings_and_is_replaced_otherwise(tmp_path: Path) -> None:
    rows = Rows(PLAN, tmp_path)
    rows.add(packed(tmp_path / "a.gz", ("small", CONFIG, [record("full", 0, 1.0), record("one@8", 0, 0.0)])))
    more = CONFIG | {"conditions": CONDITIONS | {"m/two@8": {}}, "batch_tokens": 4096}
    rows.add(packed(tmp_path / "b.gz", ("small", more, [record("m/two@8", 0, 0.5), record("one@8", 0, 1.0)])))
    assert [(a.method, a.score) for a in rows.answers] == [(FULL[0], 1.0), ("One", 1.0), ("Two", 0.5)]
    assert rows.runs[CONFIG["model"], "small"]["batch_tokens"] == 4096
    told = rows.add(packed(tmp_path / "c.gz", ("small", more | {"batch_tokens": 512}, [record("m/two@8", 1, 0.25)])))
    assert len(rows.answers) == 4 and rows.runs[CONFIG["model"], "small"]["batch_tokens"] == 4096
    told = rows.add(packed(tmp_path / "d.gz", ("small", more | {"captured": True}, [record("full", 0, 0.5)])))
    assert len(rows.answers) == 1 and "other settings" in told[0]
    told = rows.add(packed(tmp_path / "c.gz", ("small", more | {"seed": 1}, [record("full", 0, 0.5)])))
    assert "in place of a run with other settings" in told[0] and [a.score for a in rows.answers] == [0.5]
    assert (rows.drop("other"), rows.drop("small")) == (0, 1) and not rows.answers and not rows.runs


def test_rows_of_older_runs_have_no_estimates(tmp_path: Path) -> None:
    older = "model,run,context,task,sample,depth,method,budget,score,attended_tokens\nm,small,1024,copy,0,,One,8,1.0,10.0\n"
    (tmp_path / "evaluation_answers.csv").write_text(older)
    rows = Rows(PLAN, tmp_path)
    assert rows.answers == [answer("One", "copy", 0, 1.0)] and rows.answers[0].estimated_units is None
    rows.write()
    assert (tmp_path / "evaluation_answers.csv").read_text() == older.replace("tokens\n", "tokens,estimated_units\n").replace(
        "10.0\n", "10.0,\n"
    )


@pytest.mark.parametrize("name", TABLES)
def test_nothing_is_said_of_nothing(name: str, tmp_path: Path) -> None:
    text = TABLES[name](Rows(PLAN, tmp_path))
    assert text == "Nothing yet." or name in ("methods", "made")

"""What anybody may write into a run, a problem file or an answer: refused by name or shown as text; never a crash or a wait."""

from __future__ import annotations

import csv
import json
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.rows import write_csv
from kvrecall.core.errors import InputFileError, ParameterError
from kvrecall.evaluate.expressions import same_answer
from kvrecall.evaluate.plan import Plan, conditions
from kvrecall.evaluate.problems import boxed, final_choice, read_problems
from kvrecall.evaluate.runs import Shard, read_records
from kvrecall.evaluate.summary import layer_recall, rounds, summarise, windows
from kvrecall.evaluate.tasks import Turn, copied_share, says

LENGTH = 100_000
LOOPS = [
    "1", " ", "{", "}", "{}", "\\text{", "\\frac{", "1^", "--", "- 1", "1,000,", "0,", "1.", "1/", "The answer is A. ",
    "The answer is A ", "answer is A, ", "Option A is correct. ", "option A is the", "A or ", "(A) ", "\n", "\nA", "\n(A) ",
    "\\boxed{", "\\boxed{}", "$", "**", "\\,", "{,}", "not ", "it is ", "in ", "\\text{abc} ", "\\text{abc}^2", "x=", "(1,",
    "= -",    "1 000 ", "\\mod", "\\sqrt ", "\\frac{a}b", "^{\\circ", "option A  ", "\u2028", "\x00",
]  # fmt: skip
SCORERS = {
    "boxed": boxed, "choice": final_choice, "same": lambda text: same_answer(text, "1"),
    "expected": lambda text: same_answer("1", text), "says": lambda text: says(text, "12 1"),
    "copied": lambda text: copied_share(text, Turn("?", ("a b",))),
}  # fmt: skip


@pytest.mark.parametrize("name", SCORERS)
def test_scorers_take_a_time_that_grows_as_the_answer_does(name: str) -> None:
    """About 0.05 s where a quadratic one takes a minute and more; the limit lies between, far from both."""
    slow = []
    for loop in LOOPS:
        for before, after in (("", ""), ("1^", "x"), ("\\boxed{", "}")):
            text = before + (loop * (LENGTH // len(loop))) + after
            start, began = time.process_time(), time.monotonic()
            SCORERS[name](text)
            if time.process_time() - start > 6 or time.monotonic() - began > 60:
                slow.append((before, loop))
    assert not slow


def test_the_choice_of_a_loop_is_the_last_one() -> None:
    assert final_choice("The answer is A. " * 5000 + "\nThe answer is B.") == "B"


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["0", "x", "decode", "kl"]), inner, max_size=3),
    max_leaves=5,
)
FIELDS = ["task", "condition", "context", "sample", "attempt", "method", "budget", "depth", "score", "scores", "answers",
          "expected", "seconds", "new_tokens", "attended_tokens", "estimated_units", "windows", "layers", "more"]  # fmt: skip


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(held=st.dictionaries(st.sampled_from(FIELDS), JUNK, max_size=3))
def test_a_sample_of_junk_is_refused_or_summed_up(tmp_path_factory: pytest.TempPathFactory, held: dict[str, Any]) -> None:
    folder = tmp_path_factory.mktemp("junk")
    (folder / "config.json").write_text("{}")
    good = {"task": "t", "condition": "full", "method": "full", "budget": None, "context": 9, "sample": 0, "score": 1.0}
    (folder / "samples.jsonl").write_text(json.dumps(good) + "\n" + json.dumps(good | {"sample": 1} | held) + "\n")
    try:
        records = read_records(folder)
        for made in (summarise, rounds, windows, layer_recall):
            made(records)
    except InputFileError as error:
        assert "samples" in str(error)


@pytest.mark.parametrize(
    "line",
    ['{"problem": [], "answer": "7"}', '{"problem": "p", "answer": {}}', '{"problem": "p", "answer": true}', "[" * 100_000,
     '{"problem": "p", "answer": "²"}', '{"problem": "p", "answer": NaN}', '{"problem": null, "answer": 1}', "7", '"x"'],
    ids=lambda line: line[:34],
)  # fmt: skip
def test_problems_of_junk_are_named_with_their_line(tmp_path: Path, line: str) -> None:
    (tmp_path / "p.jsonl").write_text('{"problem": "p", "answer": "7"}\n' + line + "\n", encoding="utf-8")
    for kind in ("aime", "math500"):
        if kind == "math500" and "²" in line:
            continue  # an expression like any other
        with pytest.raises(InputFileError, match="line 2: "):
            read_problems(f"{kind}:{tmp_path / 'p.jsonl'}", 0)


def test_a_report_of_markup_and_formulas_is_text_in_one_file(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from kvrecall.evaluate.report import write_page

    draw = random.Random(0)
    names = [
        "<script>alert(1)</script>",
        "../../x",
        "$\\frac{",
        "a$b",
        "=1+1",
        '"><img src=x onerror=y>',
        "\x1b]0;t\x07",
        "{{ 7*7 }}",
    ]
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text(json.dumps({"model": names[0], "seed": names[5], "tasks": names}))
    lines = []
    for number, name in enumerate(names):
        own = {"task": name, "condition": f"{name}@8", "method": name, "budget": 8, "context": 100, "sample": 0, "depth": 0.5}
        said = {"score": draw.random(), "answers": [name], "expected": [[name]], "layers": {"0": 0.5}, "new_tokens": 9}
        step = {"first_step": 0, "steps": 1, "agreement": 1.0, "kl": 0.0, "recall": 1.0}
        own |= {"windows": [step]} if number % 2 else {"seconds": {"prefill": 0.1, "decode": 0.2}}
        lines.append(json.dumps(own | said))
    (run / "samples.jsonl").write_text("\n".join(lines) + "\n")
    write_page(run, run / "report.html")
    page = (run / "report.html").read_text()
    assert "<script" not in page and "<img" not in page and "&lt;script&gt;" in page and "{{ 7*7 }}" in page
    assert {str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*") if file.is_file()} == {
        "run/config.json", "run/samples.jsonl", "run/report.html"
    }  # fmt: skip


@dataclass
class Measured:
    config: str
    ms: float


def test_a_name_that_is_a_formula_is_text_in_a_csv(tmp_path: Path) -> None:
    names = ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "plain"]
    write_csv(tmp_path / "r.csv", [Measured(name, -1.5) for name in names])
    with (tmp_path / "r.csv").open(newline="") as file:
        read = [(row["config"], row["ms"]) for row in csv.DictReader(file)]
    assert read == [(name if name == "plain" else f"'{name}", "-1.5000") for name in names]


@pytest.mark.parametrize("spec, budgets", [("exact:top_k=5", [64]), ("exact:top-k=5@64", []), ("exact: top_k=5", [64, 5])])
def test_a_budget_is_given_once(spec: str, budgets: list[int]) -> None:
    with pytest.raises(ParameterError, match=r"top_k or a budget( behind @)?, not both"):
        conditions([spec], budgets)
    assert [c.label for c in conditions(["exact:top_k=5"], [])] == ["full", "exact:top_k=5@5"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_temperatures_that_are_none(value: float) -> None:
    with pytest.raises(ParameterError, match="temperature: expected a finite number >= 0"):
        Plan(("niah",), temperature=value)


@pytest.mark.parametrize("text", ["²/³", "1/²", "9" * 5000 + "/" + "9" * 5000])
def test_shares_in_other_digits(text: str) -> None:
    with pytest.raises(ParameterError, match="i/n with i from 1 to n"):
        Shard.of(text)

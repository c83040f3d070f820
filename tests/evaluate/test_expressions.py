"""Mathematical answers against ones made by hand: what a text states, what is equal, and what no expression can do."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from kvrecall.core import extras
from kvrecall.core.errors import MissingPackageError
from kvrecall.evaluate import expressions
from kvrecall.evaluate.expressions import same_answer, stated
from kvrecall.evaluate.plan import Plan
from kvrecall.evaluate.problems import Problem


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests are answered in this process: a process for each would import sympy."""
    monkeypatch.setattr(expressions, "_ask", lambda **request: expressions._reply(request))


def test_a_box_comes_before_what_a_text_states() -> None:
    problem = Problem("?", "7")
    assert problem.extract(r"\boxed{7} checked 9 times") == "7" and problem.extract("it is 1,234 or -5.5") == "-5.5"
    assert problem.extract("no number") is None and problem.extract(r"it is 5, not \boxed{}") == "5"
    assert problem.right(r"\boxed{\frac{14}{2}}") and not problem.right(r"7, or \boxed{8}")


@pytest.mark.parametrize(
    "text, found",
    [
        ("The answer is 73, which is prime", "73"),
        ("1,234, done", "1234"),
        ("**42**.", "42"),
        ("the answer - 42", "42"),
        ("42 km/h", "42"),
        (r"$90^\circ$", r"90^\circ"),
        ("x = .5", "0.5"),
        ("it is \u22125", "-5"),
        ("50%", "50"),
        ("7/8", "7/8"),
        (r"$-\dfrac{3}{4}$.", r"-\frac{3}{4}"),
        ("3, 4", "4"),
        ("5 m", "5"),
        ("in 2024\n42", "42"),
        ("it is 10 - 7", "10 - 7"),
        ("12 / 5", "12 / 5"),
        ("1 234", "1234"),
        ("The answer is $5x$.", "5x"),
    ],
)
def test_what_a_text_states(here: None, text: str, found: str | None) -> None:
    assert stated(text) == found


@pytest.mark.parametrize(
    "given, expected, same",
    [
        ("042", "42", True),
        (r"\dfrac{1}{2}", r"\frac12", True),
        ("0.5", r"\frac{1}{2}", True),
        (r"-\frac{1}{2}", "-0.5", True),
        ("1,234", "1234", True),
        (r"12\text{ cm}", "12", True),
        (r"90^\circ", "90", True),
        ("x = 5", "5", True),
        (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\frac{\pi}{2})", True),
        (r"\text{Evelyn}", r"\text{Evelyn}", True),
        ("Evelyn", r"\text{Evelyn}", True),
        ("$73$.", "73", True),
        (r"\(73\)", "73", True),
        (r"\mathbf{73}", "73", True),
        (r"1{,}234", "1234", True),
        (r"1\,234", "1234", True),
        ("1 234", "1234", True),
        (r"11,\! 111,\! 100", "11,111,100", True),
        ("(1,234)", "(1, 234)", True),
        ("\u22125", "-5", True),
        (".50", "0.5", True),
        ("1/2", r"\frac12", True),
        (r"\frac1{72}", r"\frac{1}{72}", True),
        (r"50\%", "50", True),
        (r"12\text{ cm}^2", "12", True),
        (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}", True),
        (r"4210_{5}", "4210_5", True),
        (r"11\sqrt{2}", r"11\sqrt2", True),
        (r"11\sqrt 2", r"11\sqrt{2}", True),
        (r"\sqrt{23}", r"\sqrt{2}3", False),
        (r"\sqrt23", r"\sqrt{23}", False),
        (r"\frac{\sqrt{3}}2", r"\frac{\sqrt{3}}{2}", True),
        (r"\frac{\frac12}3", r"\frac{\frac{1}{2}}{3}", True),
        ("B", r"\text{(B)}", True),
        ("C", r"\text{(B)}", False),
        (r"\theta = 30^\circ", "30", True),
        ("x_1 = 3", "3", True),
        (r"x_{12} = 3", "3", True),
        ("AB = 3", "3", True),
        ("AB = 3", "CD = 3", False),
        (r"x \in [-2,7]", "[-2,7]", True),
        (r"x\infty", r"\infty", False),
        (r"\boldsymbol{\frac{1}{2}}", r"\frac12", True),
        ("50%", "0.5", True),
        (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}", True),
        ("2(x+1)", "2x+2", True),
        (r"\{2, 1\}", r"\{1, 2\}", True),
        ("(1, 2]", "[1, 2]", False),
        (r"(-\infty, 3]", r"(-\infty,3]", True),
        ("72.9", "73", False),
        ("\u22125", "5", False),
        ("3 4", "34", False),
        ("1, 234", "1234", False),
        ("1,2,100", "1,2100", False),
        ("12_8", "128", False),
        (r"5\text{ or }7", "57", False),
        (r"6\text{ ft }2\text{ in}", "62", False),
        ("43", "42", False),
        ("(3,4)", "(4,3)", False),
        ("1/0", "0", False),
        ("", "", False),
        (None, "42", False),
    ],
)
def test_same_answer(here: None, given: str | None, expected: str, same: bool) -> None:
    assert same_answer(given, expected) is same


@pytest.mark.parametrize(
    "unit", ["cm", "square inches", "m/s", "m", "kg", "cups of tea", "sq. in.", "months", "degrees", "minutes"]
)
def test_units_are_dropped(here: None, unit: str) -> None:
    assert same_answer(rf"5\text{{ {unit}}}", "5") and same_answer(rf"5\ \mathrm{{{unit}}}^2", "5")


@pytest.mark.parametrize("endless", [r"9^{9^{9^9}}", "1000000000!"])
def test_an_expression_that_never_ends_is_no_answer(endless: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expressions, "SECONDS", 3)
    start = time.monotonic()
    assert not same_answer(endless, "1") and time.monotonic() - start < 30


def test_one_process_answers_until_one_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    judge = expressions._Judge()
    monkeypatch.setattr(expressions, "_judge", judge)
    assert same_answer("0.5", r"\frac12")
    first = judge._process
    assert same_answer("0.25", r"\frac14") and judge._process is first
    monkeypatch.setattr(expressions, "SECONDS", 1)
    assert not same_answer("9^{9^{9^9}}", "1") and first is not None and first.returncode is not None
    monkeypatch.setattr(expressions, "SECONDS", 20)
    assert same_answer("0.5", r"\frac12")


def test_an_expression_that_ends_its_process_is_no_answer() -> None:
    assert not same_answer("(" * 140 + "1" + ")" * 140, "2") and same_answer("0.5", r"\frac12")


def test_what_an_answer_says_is_not_run(tmp_path: Path) -> None:
    call = f"__import__('pathlib').Path('{tmp_path / 'x'}').touch()"
    for text in (call, rf"\text{{{call}}}", f"1+{call}", f"$1+{call}$"):
        stated(f"The answer is {text}")
        same_answer(text, "1")
    assert not list(tmp_path.iterdir())


def test_answers_as_long_as_a_loop_are_equal_only_letter_for_letter() -> None:
    digits = "7" * 100_000
    assert same_answer(digits, digits) and not same_answer(digits, digits + "0")


def test_without_math_verify_its_extra_is_named_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    for task in ("aime:a.jsonl", "math500:a.jsonl"):
        with pytest.raises(MissingPackageError, match=r'math-verify: expected .* Run `pip install "\.\[eval\]"`'):
            Plan((task,))
    assert Plan(("gpqa:a.jsonl", "niah")).tasks


def test_a_math_verify_that_does_not_start_is_an_error_and_no_wrong_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "math_verify.py").write_text("raise ImportError('another antlr')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(expressions, "_judge", expressions._Judge())  # no process that has started before
    with pytest.raises(MissingPackageError, match="math-verify: expected a release that can be imported, got an error"):
        same_answer("1/2", "0.5")

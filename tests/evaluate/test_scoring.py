"""Scorers, answer extraction, intervals and pass@k against answers made by hand."""

from __future__ import annotations

from itertools import combinations

import pytest

from kvrecall.errors import ParameterError
from kvrecall.evaluate.answers import boxed, final_choice, final_number, same_answer
from kvrecall.evaluate.intervals import interval, pass_at_k, wilson
from kvrecall.evaluate.scoring import copied_share, says, string_match_all
from kvrecall.evaluate.tasks.base import Turn


def turn(*answers: str) -> Turn:
    return Turn("?", answers)


@pytest.mark.parametrize(
    "text, answer, expected",
    [
        ("It is 1234567.", "1234567", True),
        ("It is 12345678", "1234567", False),
        ("91234567", "1234567", False),
        ("The CAT sat", "cat", True),
        ("category", "cat", False),
        ("cats", "cat", False),
        ("VAR ABCDE, FGHIJ", "FGHIJ", True),
        ("a+b (c)", "a+b", True),
        ("", "x", False),
    ],
)
def test_says(text: str, answer: str, expected: bool) -> None:
    assert says(text, answer) is expected


def test_string_match_all_is_the_share_of_answers_said() -> None:
    assert string_match_all("first 111, then 333 and 444", turn("111", "222", "333", "4444")) == 0.5
    assert string_match_all("none", turn("111")) == 0 and string_match_all("111", turn("111")) == 1


@pytest.mark.parametrize(
    "text, share",
    [
        ("one two three four", 1.0),
        (" one two x four", 0.5),
        ("two three", 0.0),
        ("one two three four </copy> and on", 1.0),
        ("", 0),
    ],
)
def test_copied_share_ends_at_the_first_mistake(text: str, share: float) -> None:
    assert copied_share(text, turn("one two three four")) == share


@pytest.mark.parametrize(
    "text, found",
    [
        (r"so \boxed{42}.", "42"),
        (r"\boxed{1} no, \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed {x_{1}^{2}}", "x_{1}^{2}"),
        (r"\fbox{7}", "7"),
        (r"\boxed{12} but \boxed{13", "12"),
        (r"\boxed{12}\boxed{}", "12"),
        (r"\boxed{12}, \boxed{ }", "12"),
        (r"\boxed{}", None),
        ("42", None),
    ],
)
def test_boxed(text: str, found: str | None) -> None:
    assert boxed(text) == found


def test_final_number_prefers_the_box() -> None:
    assert final_number(r"\boxed{7} checked 9 times") == "7" and final_number("it is 1,234 or -5.5") == "-5.5"
    assert final_number("no number") is None and final_number(r"it is 5, not \boxed{}") == "5"


@pytest.mark.parametrize(
    "text, found",
    [
        ("The answer is 73, which is prime", "73"),
        ("1,234, done", "1,234"),
        (r"it is 1{,}234, not 5\,678", "5678"),
        ("12, 34 and 1,2345", None),
        ("**42**.", "42"),
        (r"\textbf{42}", "42"),
        ("<answer>42</answer>", "42"),
        ("the answer - 42", "42"),
        ("42 km/h", "42"),
        (r"$90^\circ$", "90"),
        ("x = .5", ".5"),
        ("it is \u22125", "-5"),
        ("so x = - 5.", "-5"),
        ("50%", "50"),
        ("7/8", "7/8"),
        (r"$-\dfrac{3}{4}$.", r"-\dfrac{3}{4}"),
        ("3, 4", "4"),
    ],
)
def test_final_number_without_a_box(text: str, found: str | None) -> None:
    assert final_number(text) == found


@pytest.mark.parametrize(
    "text",
    [
        r"2^{10}", "x^2", r"3\sqrt{2}", r"3\sqrt 2", r"5\pi", "5 + 2i", "5x", "10 - 7", "3-5", "f(x) = x - 5", "(3, 4)",
        "(3,4)", "[3, 4]", r"\{3, 4\}", "3:4", "12 / 5", r"2 \times 10^5", "1e5", "x_1", "f(2)", r"\pm 5", r"\frac{\pi}{2}",
        r"\frac12", "2**10", "5/x", "5^n",
    ],
)  # fmt: skip
def test_a_part_of_an_expression_is_no_answer(text: str) -> None:
    assert final_number(f"Thus it is 1. The answer is {text}") is None


@pytest.mark.parametrize(
    "text, found",
    [
        (r"thus \boxed{C}", "C"),
        (r"\boxed{\text{(b)}}", "B"),
        ("The answer is (D).", "D"),
        ("Answer: **A**", "A"),
        ("I think A, but the correct answer is B", "B"),
        ("reasoning\nC", "C"),
        ("A boat sails", None),
        (r"\boxed{42}", None),
        (r"\boxed{B}\boxed{}", "B"),
        (r"\boxed{\textbf{(B)}}", "B"),
        (r"\boxed{$B$.}", "B"),
        (r"\boxed{E}", None),
        ("The answer is (B). To answer I used symmetry.", "B"),
        ("The answer is B. Option A is wrong.", "B"),
        ("The answer is B.\n\nA:\nno base", "B"),
        (r"The answer is \textbf{(B)}", "B"),
        (r"The answer is \text{B}.", "B"),
        (r"The answer is $\mathrm{B}$", "B"),
        (r"The answer is \(B\).", "B"),
        ("**Answer:** B) red", "B"),
        ('The answer is "B".', "B"),
        ("The answer is option B because", "B"),
        ("Answer:\n\n(b)\n\nFor it is red.", "B"),
        ("B\n\nFor it is red.", "B"),
        ("If the answer is A, x = 1, which fails.\n\nC.", "C"),
        ("Choose the right answer:\nA) red\nB) blue", None),
        ("The answer is a strong base.", None),
        ("Answer: A strong base.", None),
        ("The answer is b", None),
        ("a", None),
        ("The answer is A's neighbour", None),
        ("The answer is C. elegans", None),
        ("The answer is C-H activation", None),
        ("The answer is D glucose", None),
        ("The answer is A or B", None),
        ("Answer: (A), (B)", None),
        ("The wrong answer is C", None),
        ("The answer is I", None),
    ],
)
def test_final_choice(text: str, found: str | None) -> None:
    assert final_choice(text) == found


def test_a_choice_is_one_of_those_there_are() -> None:
    assert final_choice("The answer is (E).", "ABCDE") == final_choice(r"\boxed{e}", "ABCDE") == "E"
    assert final_choice("The answer is (E).") is None


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
        (r"4210_{5}", "4210_5", False),
        ("50%", "0.5", False),
        ("\u22125", "5", False),
        ("3 4", "34", False),
        ("1, 234", "1234", False),
        ("1,2,100", "1,2100", False),
        ("12_8", "128", False),
        (r"5\text{ or }7", "57", False),
        (r"6\text{ ft }2\text{ in}", "62", False),
        (r"5\text{ million}", "5", False),
        (r"3\mathrm{i}", "3", False),
        (r"12_\text{nine}", r"12_\text{eight}", False),
        (r"12_{\text{nine}}", r"12_{\text{eight}}", False),
        ("43", "42", False),
        ("(3,4)", "(4,3)", False),
        ("1/0", "0", False),
        ("", "", False),
        (None, "42", False),
    ],
)
def test_same_answer(given: str | None, expected: str, same: bool) -> None:
    assert same_answer(given, expected) is same


def test_wilson_is_the_textbook_interval() -> None:
    low, high = wilson(0.9, 10)
    assert (round(low, 3), round(high, 3)) == (0.596, 0.982)
    assert wilson(0.0, 10)[0] == pytest.approx(0) and round(wilson(0.0, 10)[1], 3) == 0.278


def test_the_kind_of_interval_follows_the_scores() -> None:
    assert interval([1.0, 0.0, 1.0]).kind == "wilson"
    partial = interval([0.25, 0.5, 1.0, 0.75])
    assert partial.kind == "bootstrap" and partial == interval([0.25, 0.5, 1.0, 0.75])
    assert partial.low is not None and partial.high is not None and 0.25 <= partial.low < partial.mean < partial.high <= 1
    assert interval([0.5]) == (0.5, None, None, "")
    with pytest.raises(ParameterError, match="one score or more"):
        interval([])


@pytest.mark.parametrize("attempts, right", [(1, 0), (4, 0), (4, 1), (5, 3), (6, 6)])
def test_pass_at_k_is_the_share_of_draws_with_a_right_one(attempts: int, right: int) -> None:
    for k in range(1, attempts + 1):
        draws = list(combinations([True] * right + [False] * (attempts - right), k))
        assert pass_at_k(attempts, right, k) == pytest.approx(sum(map(any, draws)) / len(draws))


@pytest.mark.parametrize("attempts, right, k", [(4, 1, 5), (4, 1, 0), (4, 5, 1), (4, -1, 1)])
def test_pass_at_k_of_what_was_not_measured(attempts: int, right: int, k: int) -> None:
    with pytest.raises(ParameterError, match="k in"):
        pass_at_k(attempts, right, k)

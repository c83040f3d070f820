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
        ("42", None),
    ],
)
def test_boxed(text: str, found: str | None) -> None:
    assert boxed(text) == found


def test_final_number_prefers_the_box() -> None:
    assert final_number(r"\boxed{7} checked 9 times") == "7" and final_number("it is 1,234 or -5.5") == "-5.5"
    assert final_number("no number") is None


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
    ],
)
def test_final_choice(text: str, found: str | None) -> None:
    assert final_choice(text) == found


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

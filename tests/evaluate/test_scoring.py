"""Scorers, answer extraction, intervals and pass@k against answers made by hand."""

from __future__ import annotations

from itertools import combinations

import pytest

from kvrecall.core.errors import ParameterError
from kvrecall.evaluate.problems import boxed, final_choice
from kvrecall.evaluate.summary import interval, pass_at_k, wilson
from kvrecall.evaluate.tasks import Turn, copied_share, says, string_match_all


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
        ("The answer is (B). To answer I used symmetry.", None),
        (r"The answer is \textbf{(B)}", "B"),
        (r"The answer is \text{B}.", "B"),
        (r"The answer is $\mathrm{B}$", "B"),
        (r"The answer is \(B\).", "B"),
        ('The answer is "B".', "B"),
        ("B\n\nFor it is red.", None),
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
        ("The answer is I", None),
        (r"\boxed{(B) 10}", "B"),
        (r"\boxed{B. foo}", "B"),
        (r"\boxed{B) 10 m}", "B"),
        (r"\boxed{\textbf{(B)}\ 10}", "B"),
        (r"\boxed{\text{(B) } 10^{-3}\text{ m}}", "B"),
        (r"\boxed{(A) A and B only}", "A"),
        (r"\boxed{b. foo}", None),
        (r"\boxed{B 10}", None),
        (r"\boxed{A boat}", None),
        (r"\boxed{C.H}", None),
        (r"\boxed{(A) or (B)}", None),
        (r"\boxed{(A), (B)}", None),
        (r"\boxed{(A) 1 or (B) 2}", None),
        ("The answer is:\nA) 10 m\nB) 20 m", None),
        ("Choose the right answer:\nA) red\n  or pink\n\n(B) blue", None),
        ("The answer is B) 10 or C) 20", None),
        ("The answer must be C", "C"),
        ("The answer must be C.", "C"),
        ("The answer must be A or C", None),
        ("Option B is correct", None),
        ("Option B is correct about x.", None),
        ("Option B is incorrect", None),
        ("Option A is correct. Option C is correct.", None),
        ("If option B is correct, x = 1.", None),
        ("Neither option A nor option B is correct.", None),
        ("It is not true that option B is correct.", None),
        ("If the answer is A, then we get a contradiction. So it must be B.", None),
        ("If the answer is A, then we get a contradiction. So the answer must be B.", "B"),
        ("If x is 1.5, y is 2, so the answer is B.", "B"),
        ("The answer is A.\nWait, it should be C", None),
        ("The answer is A.\nWait, the answer is C", "C"),
        ("A\n\nWait, it should be C, I think", None),
        ("The answer is A. No, that is wrong.", None),
        ("a previous answer is B, which is wrong", None),
        ("The answer is B, but this cannot be.", None),
        ("Which answer is D?", None),
        ("Is it true that the answer is D?", None),
    ],
)
def test_final_choice(text: str, found: str | None) -> None:
    assert final_choice(text) == found


def test_a_choice_is_one_of_those_there_are() -> None:
    assert final_choice("The answer is (E).", "ABCDE") == final_choice(r"\boxed{e}", "ABCDE") == "E"
    assert final_choice("The answer is (E).") is None


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

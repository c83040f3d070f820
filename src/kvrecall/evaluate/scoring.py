"""Scores of answers, each in [0, 1]."""

from __future__ import annotations

import re
from typing import Protocol


class Expected(Protocol):
    """What a right answer says."""

    @property
    def answers(self) -> tuple[str, ...]: ...


def says(text: str, answer: str) -> bool:
    """Whether a text contains an answer as whole words or numbers, in any case: "12" is not in "3124", nor "cat" in "cats"."""
    return re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", text, re.IGNORECASE) is not None


def string_match_all(text: str, expected: Expected) -> float:
    """Share of the expected answers that a text contains (RULER's string_match_all, by whole words)."""
    return sum(says(text, answer) for answer in expected.answers) / len(expected.answers)


def copied_share(text: str, expected: Expected) -> float:
    """Share of the expected words that a text repeats in order before its first mistake."""
    wanted, given = expected.answers[0].split(), text.replace("</copy>", " ").split()
    right = 0
    while right < min(len(wanted), len(given)) and wanted[right] == given[right]:
        right += 1
    return right / len(wanted)

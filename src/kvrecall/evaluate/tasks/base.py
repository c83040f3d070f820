"""What a task is: documents with questions, made from a seed to a wanted length, and a score in [0, 1] for each answer."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass

from kvrecall.evaluate.tasks.text import Count


@dataclass(frozen=True)
class Turn:
    """One question. answers: what a right answer says, all of it. opening: how the answer is made to begin (RULER's way)."""

    question: str
    answers: tuple[str, ...]
    opening: str = ""


@dataclass(frozen=True)
class Room:
    """What a sample may use. count: tokens of a text; document_tokens: the most that the document may have."""

    count: Count
    document_tokens: int


Make = Callable[[Room, random.Random, float], tuple[str, tuple[Turn, ...]]]
"""(room, draws, depth in [0, 1]) -> document and turns; the same draws give the same sample."""


@dataclass(frozen=True)
class Task:
    """A generated task.

    spec: its name, with its argument as asked for. answer_tokens: room for each answer. turns: questions per document.
    depths: whether samples are spread over depths, for a heat map. question_tokens: room for one question and its opening.
    """

    spec: str
    make: Make
    score: Callable[[str, Turn], float]
    answer_tokens: int
    instruction: str
    turns: int = 1
    depths: bool = False
    question_tokens: int = 96


def says(text: str, answer: str) -> bool:
    """Whether a text contains an answer as whole words or numbers, in any case: "12" is not in "3124", nor "cat" in "cats"."""
    return re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", text, re.IGNORECASE) is not None


def string_match_all(text: str, expected: Turn) -> float:
    """Share of the expected answers that a text contains (RULER's string_match_all, by whole words)."""
    return sum(says(text, answer) for answer in expected.answers) / len(expected.answers)


def copied_share(text: str, expected: Turn) -> float:
    """Share of the expected words that a text repeats in order before its first mistake."""
    wanted, given = expected.answers[0].split(), text.replace("</copy>", " ").split()
    right = 0
    while right < min(len(wanted), len(given)) and wanted[right] == given[right]:
        right += 1
    return right / len(wanted)

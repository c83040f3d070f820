"""The demo's document and its questions."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files


@dataclass(frozen=True)
class Question:
    """answer: words that a right answer contains. depth: its place in the document, 0 at the start and 1 at the end."""

    question: str
    answer: str
    depth: float

    def answered_by(self, text: str) -> bool:
        """Whether a text contains the expected words, in any case."""
        return self.answer.casefold() in text.casefold()


def harbour_log() -> tuple[str, list[Question]]:
    """The document and its questions, from the package's data."""
    data = files("kvrecall") / "data"
    listed = json.loads((data / "harbour_log.json").read_text(encoding="utf-8"))
    document = (data / listed["document"]).read_text(encoding="utf-8")
    return document, [Question(q["question"], q["answer"], q["depth"]) for q in listed["questions"]]


def excerpt(document: str, questions: list[Question], count: Callable[[str], int], limit_tokens: int) -> str:
    """At most `limit_tokens` of the document, as whole paragraphs: those with the answers, and their neighbours.

    count: returns the tokens of a text. Paragraphs with answers are always included, even beyond the limit.
    """
    paragraphs = document.split("\n\n")
    tokens = [count(paragraph) + 1 for paragraph in paragraphs]
    chosen = {_paragraph_of(question, paragraphs) for question in questions}
    used, facts = sum(tokens[i] for i in chosen), sorted(chosen)
    for distance in range(1, len(paragraphs)):
        for fact in facts:
            for near in (fact + distance, fact - distance):
                if 0 <= near < len(paragraphs) and near not in chosen and used + tokens[near] <= limit_tokens:
                    chosen.add(near)
                    used += tokens[near]
    return "\n\n".join(paragraphs[i] for i in sorted(chosen))


def _paragraph_of(question: Question, paragraphs: list[str]) -> int:
    """The paragraph that contains the answer; of several, the one nearest to its depth."""
    place = question.depth * sum(len(p) + 2 for p in paragraphs)
    best, best_distance, start = 0, float("inf"), 0
    for number, paragraph in enumerate(paragraphs):
        distance = max(start - place, place - start - len(paragraph), 0)
        if question.answer in paragraph and distance < best_distance:
            best, best_distance = number, distance
        start += len(paragraph) + 2
    return best

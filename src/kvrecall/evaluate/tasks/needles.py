"""Needles in a haystack (Kamradt 2023; RULER, Hsieh et al. 2024, section 3): magic numbers in filler, then questions.

`niah`: one needle. `niah-multikey:K`: K needles, one asked for. `niah-multivalue:V`: one name with V numbers, all asked for.
`niah-multiquery:Q`: Q names asked for at once. `multi-turn:T`: T needles, one asked for per turn (CTkvr, Table 5).
"""

from __future__ import annotations

import random

from kvrecall.evaluate.scoring import string_match_all
from kvrecall.evaluate.tasks.base import Room, Task, Turn
from kvrecall.evaluate.tasks.text import haystack, names, numbers

_INSTRUCTION = "Some special magic numbers are hidden in the text above. Answer with the numbers alone."


def niah(spec: str, _: int) -> Task:
    """One needle at a given depth."""

    def make(room: Room, draw: random.Random, depth: float) -> tuple[str, tuple[Turn, ...]]:
        (name,), (value,) = names(draw, 1), numbers(draw, 1)
        document = haystack(draw, room.count, room.document_tokens, [(depth, _needle(name, value))])
        return document, (_ask([name], [value]),)

    return Task(spec, make, string_match_all, 32, _INSTRUCTION, depths=True)


def multikey(spec: str, keys: int) -> Task:
    """`keys` needles in all; one of them is asked for."""

    def make(room: Room, draw: random.Random, _: float) -> tuple[str, tuple[Turn, ...]]:
        called, values = names(draw, keys), numbers(draw, keys)
        document = _hide(room, draw, list(zip(called, values, strict=True)))
        return document, (_ask(called[:1], values[:1]),)

    return Task(spec, make, string_match_all, 32, _INSTRUCTION)


def multivalue(spec: str, count: int) -> Task:
    """One name with several numbers."""

    def make(room: Room, draw: random.Random, _: float) -> tuple[str, tuple[Turn, ...]]:
        (name,), values = names(draw, 1), numbers(draw, count)
        document = _hide(room, draw, [(name, value) for value in values])
        return document, (_ask([name], values),)

    return Task(spec, make, string_match_all, 16 + 12 * count, _INSTRUCTION)


def multiquery(spec: str, count: int) -> Task:
    """Several names asked for in one question."""

    def make(room: Room, draw: random.Random, _: float) -> tuple[str, tuple[Turn, ...]]:
        called, values = names(draw, count), numbers(draw, count)
        document = _hide(room, draw, list(zip(called, values, strict=True)))
        return document, (_ask(called, values),)

    return Task(spec, make, string_match_all, 16 + 20 * count, _INSTRUCTION, question_tokens=96 + 16 * count)


def multi_turn(spec: str, turns: int) -> Task:
    """One conversation about one document, a needle per turn."""

    def make(room: Room, draw: random.Random, _: float) -> tuple[str, tuple[Turn, ...]]:
        called, values = names(draw, turns), numbers(draw, turns)
        document = _hide(room, draw, list(zip(called, values, strict=True)))
        return document, tuple(_ask([name], [value]) for name, value in zip(called, values, strict=True))

    return Task(spec, make, string_match_all, 32, _INSTRUCTION, turns=turns)


def _needle(name: str, value: str) -> str:
    return f"One of the special magic numbers for {name} is: {value}."


def _hide(room: Room, draw: random.Random, needles: list[tuple[str, str]]) -> str:
    passages = [(draw.random(), _needle(name, value)) for name, value in needles]
    return haystack(draw, room.count, room.document_tokens, passages)


def _ask(called: list[str], values: list[str]) -> Turn:
    said = ", ".join(called)
    if len(values) == 1:
        question = f"What is the special magic number for {said} mentioned in the text?"
        return Turn(question, tuple(values), f" The special magic number for {said} mentioned in the text is")
    question = f"What are all the special magic numbers for {said} mentioned in the text?"
    return Turn(question, tuple(values), f" The special magic numbers for {said} mentioned in the text are")

"""Text from a seed: filler of a wanted length with passages put at given depths, and words to make names of.

All of it comes from the harbour log that the package ships, so nothing is fetched and every run sees the same text.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from functools import cache
from importlib.resources import files

from kvrecall.core.errors import ParameterError

Count = Callable[[str], int]
"""Tokens of a text, without special tokens."""


@cache
def log_text() -> str:
    """The harbour log, as shipped."""
    return (files("kvrecall") / "data" / "harbour_log.md").read_text(encoding="utf-8")


@cache
def sentences() -> tuple[str, ...]:
    """Sentences of the harbour log, headings left out."""
    paragraphs = [" ".join(p.split()) for p in log_text().split("\n\n") if not p.startswith("#")]
    return tuple(s for p in paragraphs for s in re.split(r"(?<=[.!?])\s+", p) if len(s.split()) > 3)


@cache
def vocabulary() -> tuple[str, ...]:
    """Lower-case English words of 4 to 9 letters, sorted: about 1,400, all from the harbour log."""
    return tuple(sorted(set(re.findall(r"\b[a-z]{4,9}\b", log_text()))))


def made_up(draw: random.Random) -> Iterator[str]:
    """Words without end, all different and none of the vocabulary: the head of one of its words and the tail of another."""
    words = vocabulary()
    used = set(words)
    while True:
        head, tail = draw.choice(words), draw.choice(words)
        word = head[: len(head) // 2] + tail[len(tail) // 2 :]
        while word in used:
            word += draw.choice(words)[-2:]
        used.add(word)
        yield word


def names(draw: random.Random, count: int) -> list[str]:
    """Distinct two-word names such as "patient-lantern"."""
    words = vocabulary()
    return distinct(count, lambda: f"{draw.choice(words)}-{draw.choice(words)}")


def distinct(count: int, make: Callable[[], str]) -> list[str]:
    """The first `count` different texts that `make` returns."""
    texts: dict[str, None] = {}
    while len(texts) < count:
        texts[make()] = None
    return list(texts)


def numbers(draw: random.Random, count: int, digits: int = 7) -> list[str]:
    """Distinct numbers of that many digits."""
    return [str(n) for n in draw.sample(range(10 ** (digits - 1), 10**digits), count)]


def filler(draw: random.Random) -> Iterator[str]:
    """Sentences without end: all of them in a random order, then all of them in another."""
    while True:
        yield from draw.sample(sentences(), len(sentences()))


def haystack(draw: random.Random, count: Count, room_tokens: int, passages: list[tuple[float, str]]) -> str:
    """At most `room_tokens` tokens of filler with the passages at their depths (0: first, 1: last), each in one piece.

    Raises ParameterError if the passages alone do not fit.
    """
    used = sum(count(f" {text}") for _, text in passages)
    if used > room_tokens:
        remedy = "Give --context more tokens, or the task fewer keys."
        raise ParameterError("context", f"room for {used:,} tokens of passages", room_tokens, remedy)
    pieces: list[str] = []
    costs: dict[str, int] = {}
    for piece in filler(draw):
        cost = costs.setdefault(piece, count(f" {piece}"))
        if used + cost > room_tokens:
            break
        pieces.append(piece)
        used += cost
    while True:
        text = _joined(pieces, passages)
        # Pieces one by one may have fewer tokens than the whole: the exact count decides.
        if count(text) <= room_tokens or not pieces:
            return text
        pieces.pop()


def _joined(pieces: list[str], passages: list[tuple[float, str]]) -> str:
    placed = sorted((round(depth * len(pieces)), order, text) for order, (depth, text) in enumerate(passages))
    out, start = [], 0
    for place, _, text in placed:
        out += [*pieces[start:place], text]
        start = place
    return " ".join([*out, *pieces[start:]])

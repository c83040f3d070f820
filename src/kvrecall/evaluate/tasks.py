"""Generated tasks: documents with questions, made from a seed to a wanted length, and a score in [0, 1] for each answer.

RULER's (Hsieh et al. 2024, section 3): needles in a haystack, which are magic numbers in filler (Kamradt 2023). `niah`: one.
`niah-multikey:K`: K needles, one asked for. `niah-multivalue:V`: one name with V numbers, all asked for. `niah-multiquery:Q`:
Q names asked for at once. `multi-turn:T`: T needles, one asked for per turn (CTkvr, Table 5). `variable-tracking:HOPS`: a chain
of assignments; name every variable that holds the value. `common-words:C`: the C words that stand often in a list where the
others stand seldom. `frequent-words:W`: the W most frequent invented words of a Zipf text.

Look-up and copying: `json-kv` (Liu et al. 2023, "Lost in the middle") and `copy:WORDS`. Both ask for text that stands in the
document once and cannot be guessed; copying does so for hundreds of tokens on end, so a selection that goes stale while the
answer grows shows as the place where the copy first goes wrong.
"""

from __future__ import annotations

import json
import random
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice, pairwise, takewhile
from string import ascii_lowercase, ascii_uppercase
from typing import Any

from kvrecall.core.errors import ParameterError, UnknownNameError
from kvrecall.core.texts import whole
from kvrecall.evaluate.text import Count, distinct, haystack, made_up, names, numbers, vocabulary


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


Document = tuple[str, tuple[Turn, ...]]
"""A text and its questions."""
Make = Callable[[Room, random.Random, float], Document]
"""(room, draws, depth in [0, 1]) -> document; the same draws give the same sample."""


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
    words, copy = expected.answers[0].split(), text.replace("</copy>", " ").split()
    right = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(words, copy, strict=False))))
    return right / len(words)


_INSTRUCTION = "Some special magic numbers are hidden in the text above. Answer with the numbers alone."
_FREQUENCIES = ((30, 3), (20, 2), (10, 1))
"""Of common and of uncommon words: RULER's, then smaller ones of the same ratio for contexts too short for it."""
_FILLED = 0.9
"""A list of the log's own words that fills this share of its room gets no made-up ones."""
_ZIPF = 2.0  # RULER's exponent
_NOISE = "...."


def niah(spec: str, _: int) -> Task:
    """One needle at a given depth."""
    return _needles(spec, 1, 32, _first, depths=True)


def multikey(spec: str, keys: int) -> Task:
    """`keys` needles in all, and a question about the first."""
    return _needles(spec, keys, 32, _first)


def multivalue(spec: str, count: int) -> Task:
    """One name with several numbers."""
    return _needles(spec, count, 16 + 12 * count, lambda names, values: (_question(names[:1], values),), one_name=True)


def multiquery(spec: str, count: int) -> Task:
    """Several names in one question."""
    room = 96 + 16 * count
    return _needles(spec, count, 16 + 20 * count, lambda names, values: (_question(names, values),), question_tokens=room)


def multi_turn(spec: str, turns: int) -> Task:
    """One conversation about one document, a needle per turn."""

    def questions(names: list[str], values: list[str]) -> tuple[Turn, ...]:
        return tuple(_question([name], [value]) for name, value in zip(names, values, strict=True))

    return _needles(spec, turns, 32, questions, turns=turns)


def _needles(
    spec: str, count: int, answer_tokens: int, questions: Callable[[list[str], list[str]], tuple[Turn, ...]], *,
    one_name: bool = False, depths: bool = False, **options: Any,
) -> Task:  # fmt: skip
    """`count` needles at random depths. questions: of names and numbers. one_name: all numbers have the same name. depths: all
    needles are at the sample's depth."""

    def make(room: Room, draw: random.Random, depth: float) -> Document:
        subjects, values = names(draw, 1 if one_name else count), numbers(draw, count)
        subjects = subjects * count if one_name else subjects
        needles = [_needle(name, value) for name, value in zip(subjects, values, strict=True)]
        passages = [(depth if depths else draw.random(), needle) for needle in needles]
        return haystack(draw, room.count, room.document_tokens, passages), questions(subjects, values)

    return Task(spec, make, string_match_all, answer_tokens, _INSTRUCTION, depths=depths, **options)


def _needle(name: str, value: str) -> str:
    return f"One of the special magic numbers for {name} is: {value}."


def _first(names: list[str], values: list[str]) -> tuple[Turn, ...]:
    return (_question(names[:1], values[:1]),)


def _question(names: list[str], values: list[str]) -> Turn:
    subject = f"for {', '.join(names)} mentioned in the text"
    if len(values) == 1:
        return Turn(f"What is the special magic number {subject}?", tuple(values), f" The special magic number {subject} is")
    question = f"What are all the special magic numbers {subject}?"
    return Turn(question, tuple(values), f" The special magic numbers {subject} are")


def variable_tracking(spec: str, hops: int) -> Task:
    """One chain of `hops` copies of a number: VAR A = 12345, VAR B = VAR A, …"""

    def make(room: Room, draw: random.Random, _: float) -> Document:
        variables = distinct(hops + 1, lambda: "".join(draw.choices(ascii_uppercase, k=5)))
        (value,) = numbers(draw, 1, digits=5)
        lines = [f"VAR {variables[0]} = {value}."]
        lines += [f"VAR {new} = VAR {old}." for old, new in pairwise(variables)]
        depths = sorted(draw.random() for _ in lines)  # a copy never comes before its source
        document = haystack(draw, room.count, room.document_tokens, list(zip(depths, lines, strict=True)))
        question = f"Find all variables that are assigned the value {value} in the text above, directly or through others."
        opening = f" The {hops + 1} variables that are assigned the value {value} are"
        return document, (Turn(question, tuple(variables), opening),)

    instruction = "The text above hides chains of variable assignments. Answer with the names of the variables alone."
    return Task(spec, make, string_match_all, 16 + 10 * hops, instruction)


def common_words(spec: str, common: int) -> Task:
    """A numbered list of words; the common ones stand 30 times in it, the others 3 times, as many as there is room for.

    Where the log's words are too few, made-up ones stand among the others.
    """

    def make(room: Room, draw: random.Random, _: float) -> Document:
        words = draw.sample(vocabulary(), len(vocabulary()))
        often, others = words[:common], words[common:]

        def numbered(uncommon: int, frequencies: tuple[int, int]) -> str:
            every = often * frequencies[0] + others[:uncommon] * frequencies[1]
            random.Random(uncommon).shuffle(every)
            return " ".join(f"{i}. {word}" for i, word in enumerate(every, 1))

        for frequencies in _FREQUENCIES:
            most = _largest(lambda n, f=frequencies: room.count(numbered(n, f)), room.document_tokens, len(others))
            if most >= common:
                break
        else:
            expected = f"room for {common} common words and as many others"
            raise ParameterError("context", expected, room.document_tokens, "Give --context more tokens.")
        if most == len(others) and room.count(numbered(most, frequencies)) < _FILLED * room.document_tokens:
            invented = made_up(draw)
            while room.count(numbered(len(others), frequencies)) <= room.document_tokens:
                others += islice(invented, len(others))
            most = _largest(lambda n: room.count(numbered(n, frequencies)), room.document_tokens, len(others))
        while room.count(numbered(most, frequencies)) > room.document_tokens:  # another order may have a token or two more
            most -= 1
        text = numbered(most, frequencies)
        question = f"What are the {common} most common words in the list above?"
        return text, (Turn(question, tuple(often), f" The {common} most common words in the list are:"),)

    instruction = "The text above is a numbered list of words. Some of them stand in it often, most of them seldom."
    return Task(spec, make, string_match_all, 16 + 10 * common, instruction)


def frequent_words(spec: str, count: int) -> Task:
    """Invented words with Zipf frequencies, the first of which is noise ("...."), as in RULER.

    Where a word of the answer would be as frequent as another one, it also stands in the place of one noise word.
    """

    def make(room: Room, draw: random.Random, _: float) -> Document:
        invented = distinct(200, lambda: "".join(draw.choices(ascii_lowercase, k=6)))
        weights = [rank**-_ZIPF for rank in range(1, len(invented) + 1)]
        text = draw.choices([_NOISE, *invented[1:]], weights, k=2 * room.document_tokens)
        most = _largest(lambda n: room.count(" ".join(text[:n])), room.document_tokens, len(text))
        words = _without_tie(text[:most], count)
        while words and room.count(" ".join(words)) > room.document_tokens:  # a word may have more tokens than noise
            most -= 1
            words = _without_tie(text[:most], count)
        if not words:
            raise ParameterError("context", f"room for {count + 1} kinds of words", room.document_tokens, "Give it more.")
        question = f"Do not count dots. What are the {count} most frequent words in the coded text above?"
        opening = f" The {count} most frequent words are:"
        return " ".join(words), (Turn(question, tuple(_ranked(words)[:count]), opening),)

    instruction = "The text above is coded. Track how often each coded word appears in it."
    return Task(spec, make, string_match_all, 16 + 10 * count, instruction)


def _ranked(words: list[str]) -> list[str]:
    """Kinds of words but for noise, the most frequent first; equally frequent ones by the alphabet."""
    counts = Counter(word for word in words if word != _NOISE)
    return sorted(counts, key=lambda word: (-counts[word], word))


def _without_tie(words: list[str], count: int) -> list[str]:
    """The words with each of the `count` most frequent kinds more frequent than any other: what ties takes the place of a
    noise word. Empty if there are not kinds or noise enough."""
    ranked = _ranked(words)
    if len(ranked) <= count:
        return []
    counts = Counter(words)
    ties = [word for word in ranked[:count] if counts[word] == counts[ranked[count]]]
    noise = [place for place, word in enumerate(words) if word == _NOISE]
    if len(ties) > len(noise):
        return []
    result = list(words)
    for place, word in zip(random.Random(len(words)).sample(noise, len(ties)), ties, strict=True):
        result[place] = word
    return result


def _largest(tokens: Callable[[int], int], room: int, limit: int) -> int:
    """The largest n in [0, limit] whose text still fits, by bisection over a count that grows with n."""
    return limit - bisect_left(range(limit, 0, -1), True, key=lambda n: tokens(n) <= room)


def json_kv(spec: str, digits: int) -> Task:
    """A JSON object of random keys and values as large as fits; the question is the value of one key.

    digits: of each, in hex. Where all such keys are used, keys of a digit more follow.
    """

    def make(room: Room, draw: random.Random, _: float) -> Document:
        def word(digits: int) -> str:
            return f"{draw.getrandbits(4 * digits):0{digits}x}"

        pairs: dict[str, str] = {}
        tokens = 2
        width, unused = digits, 16**digits
        while tokens <= room.document_tokens:
            if not unused:
                width, unused = width + 1, 16 ** (width + 1)
            key, value = word(width), word(digits)
            if key in pairs:
                continue
            unused -= 1
            pairs[key] = value
            tokens += room.count(f'"{key}": "{value}",\n')
        text = json.dumps(pairs, indent=0)
        while room.count(text) > room.document_tokens:
            pairs.popitem()
            text = json.dumps(pairs, indent=0)
        if len(pairs) < 2:
            raise ParameterError("context", "room for two pairs or more", room.document_tokens, "Give --context more tokens.")
        key = draw.choice(list(pairs))
        return text, (Turn(f'What is the value of the key "{key}"?', (pairs[key],), f' The value of the key "{key}" is "'),)

    instruction = "The text above is a JSON object. Answer with the value alone."
    return Task(spec, make, string_match_all, 2 * digits + 8, instruction, question_tokens=64 + 4 * digits)


def copy(spec: str, words: int) -> Task:
    """Random words inside filler are to be repeated in order. words: how many."""

    def make(room: Room, draw: random.Random, _: float) -> Document:
        passage = " ".join(draw.choices(vocabulary(), k=words))
        document = haystack(draw, room.count, room.document_tokens, [(draw.random(), f"<copy> {passage} </copy>")])
        return document, (Turn("Repeat all the words between <copy> and </copy>, in order.", (passage,), " <copy>"),)

    instruction = "The text above has a list of words between <copy> and </copy>."
    return Task(spec, make, copied_share, 3 * words + 8, instruction)


@dataclass(frozen=True)
class TaskType:
    """factory: (spec, argument) -> Task. argument: its default; meaning: of the argument, "" if there is none. least: of it."""

    factory: Callable[[str, int], Task]
    summary: str
    argument: int = 0
    meaning: str = ""
    least: int = 1
    most: int = 1024


KNOWN = {
    "niah": TaskType(niah, "one needle in a haystack, over depths and lengths"),
    "niah-multikey": TaskType(multikey, "one needle among many", 8, "needles in the text", 2, 64),
    "niah-multivalue": TaskType(multivalue, "all numbers of one name", 4, "numbers of the name", 2, 64),
    "niah-multiquery": TaskType(multiquery, "several needles in one question", 4, "needles asked for", 2, 64),
    "multi-turn": TaskType(multi_turn, "a needle per turn of one conversation", 8, "turns", 2, 32),
    "variable-tracking": TaskType(variable_tracking, "every variable of a chain of assignments", 4, "hops", 1, 32),
    "common-words": TaskType(common_words, "words that stand often in a list", 10, "common words", 1, 50),
    "frequent-words": TaskType(frequent_words, "the most frequent invented words", 3, "words asked for", 1, 20),
    "json-kv": TaskType(json_kv, "the value of a key in a JSON object", 8, "hex digits of key and value", 2, 32),
    "copy": TaskType(copy, "repeat a passage word for word", 100, "words to repeat", 2, 8192),
}


def generated(spec: str) -> Task:
    """The task of a spec; raises UnknownNameError or ParameterError."""
    name, colon, argument = spec.partition(":")
    if name not in KNOWN:
        raise UnknownNameError("task", name, KNOWN)
    kind = KNOWN[name]
    if not colon:
        return kind.factory(spec, kind.argument)
    if not kind.meaning:
        raise ParameterError(f"task {name}", "no argument", argument, f"Write {name} alone.")
    if not kind.least <= whole(argument) <= kind.most:
        expected = f"{kind.meaning}, an integer in [{kind.least}, {kind.most}]"
        raise ParameterError(f"task {name}", expected, argument, f"For example {name}:{kind.argument}.")
    return kind.factory(spec, int(argument))

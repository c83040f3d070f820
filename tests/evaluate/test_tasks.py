"""Generated tasks come from their seed, fit their length and hold their answers; a perfect answer scores 1."""

from __future__ import annotations

import json
import random
import re
from collections import Counter

import pytest

from kvrecall.errors import ParameterError, UnknownNameError
from kvrecall.evaluate.tasks.base import Room
from kvrecall.evaluate.tasks.registry import KNOWN, generated
from kvrecall.evaluate.tasks.text import haystack, sentences, vocabulary


def count(text: str) -> int:
    """As a tokenizer would: words, digits in threes, punctuation."""
    return len(re.findall(r"[A-Za-z]+|\d{1,3}|[^\w\s]", text))


ROOM = Room(count, 2000)


@pytest.mark.parametrize("spec", [*KNOWN, "niah-multikey:64", "copy:30", "variable-tracking:1", "multi-turn:2"])
def test_samples_come_from_the_seed_and_fill_their_room(spec: str) -> None:
    task = generated(spec)
    document, turns = task.make(ROOM, random.Random("0/a"), 0.5)
    assert (document, turns) == task.make(ROOM, random.Random("0/a"), 0.5)
    assert document != task.make(ROOM, random.Random("1/a"), 0.5)[0]
    assert 0.85 * ROOM.document_tokens < count(document) <= ROOM.document_tokens
    assert len(turns) == task.turns and all(count(t.question) + count(t.opening) <= task.question_tokens for t in turns)
    for turn in turns:
        perfect = " ".join(turn.answers)
        assert all(answer in document for answer in turn.answers)
        assert task.score(perfect, turn) == 1 and task.score("I do not know.", turn) == 0
        assert 2 * count(perfect) <= 3 * task.answer_tokens


@pytest.mark.parametrize("depth", [0.0, 0.3, 1.0])
def test_a_needle_lies_at_its_depth(depth: float) -> None:
    document, (turn,) = generated("niah").make(ROOM, random.Random(3), depth)
    place = document.index(turn.answers[0])
    assert place / len(document) == pytest.approx(depth, abs=0.06)
    assert document.count(turn.answers[0]) == 1


def test_keys_values_and_queries_are_as_many_as_asked_for() -> None:
    many, (one,) = generated("niah-multikey:20").make(ROOM, random.Random(0), 0.5)
    assert many.count("One of the special magic numbers for") == 20 and len(one.answers) == 1
    _, (values,) = generated("niah-multivalue:6").make(ROOM, random.Random(0), 0.5)
    _, (queries,) = generated("niah-multiquery:5").make(ROOM, random.Random(0), 0.5)
    assert len(set(values.answers)) == 6 and len(set(queries.answers)) == 5
    _, turns = generated("multi-turn:8").make(ROOM, random.Random(0), 0.5)
    assert len({t.question for t in turns}) == 8


def test_a_chain_of_variables_never_copies_before_it_assigns() -> None:
    document, (turn,) = generated("variable-tracking:5").make(ROOM, random.Random(1), 0.5)
    value = re.search(r"VAR (\w+) = (\d+)\.", document)
    assert value and value[2] in turn.question and len(turn.answers) == 6
    known = {value[1]}
    for new, old in re.findall(r"VAR (\w+) = VAR (\w+)\.", document):
        assert old in known
        known.add(new)
    assert known == set(turn.answers)


def test_the_words_asked_for_are_the_most_common() -> None:
    document, (turn,) = generated("common-words:10").make(ROOM, random.Random(1), 0.5)
    counted = Counter(re.findall(r"\d+\. (\w+)", document))
    assert {w for w, _ in counted.most_common(10)} == set(turn.answers)
    ordered = counted.most_common()
    assert ordered[9][1] == 10 * ordered[10][1]
    document, (turn,) = generated("frequent-words:3").make(ROOM, random.Random(1), 0.5)
    counted = Counter(word for word in document.split() if word != "....")
    assert [w for w, _ in counted.most_common(3)] == list(turn.answers)


def test_json_is_json_and_a_copy_is_one_passage() -> None:
    document, (turn,) = generated("json-kv:12").make(ROOM, random.Random(1), 0.5)
    asked = re.search(r'"(\w+)"', turn.question)
    assert asked and json.loads(document)[asked[1]] == turn.answers[0] and len(turn.answers[0]) == 12
    document, (turn,) = generated("copy:50").make(ROOM, random.Random(1), 0.5)
    assert f"<copy> {turn.answers[0]} </copy>" in document and len(turn.answers[0].split()) == 50


def test_filler_does_not_repeat_before_it_must() -> None:
    assert len(sentences()) > 300 and len(vocabulary()) > 1000
    text = haystack(random.Random(0), count, 3000, [])
    assert all(text.count(s) <= 1 for s in sentences() if len(s) > 60)


@pytest.mark.parametrize(
    "spec, said",
    [
        ("niah:3", "no argument"),
        ("niah-multikey:65", r"needles in the text, an integer in \[2, 64\]"),
        ("niah-multikey:x", "an integer in"),
        ("copy:", "words to repeat"),
    ],
)
def test_arguments_that_a_task_cannot_have(spec: str, said: str) -> None:
    with pytest.raises(ParameterError, match=said):
        generated(spec)


def test_unknown_tasks_list_the_known_ones() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown task 'niax'.*json-kv.*Did you mean 'niah'"):
        generated("niax")


@pytest.mark.parametrize("spec", ["niah", "niah-multikey:64", "common-words", "json-kv", "copy", "frequent-words"])
def test_too_little_room_is_refused(spec: str) -> None:
    with pytest.raises(ParameterError, match="context: expected"):
        generated(spec).make(Room(count, 8), random.Random(0), 0.5)

"""Generated tasks come from their seed, fit their length and hold their answers; a perfect answer scores 1."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from hashlib import sha256
from itertools import islice

import pytest

from kvrecall.core.errors import ParameterError, UnknownNameError
from kvrecall.evaluate.tasks import KNOWN, Room, generated
from kvrecall.evaluate.text import haystack, made_up, sentences, vocabulary


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


def test_a_list_of_common_words_fills_any_room() -> None:
    for tokens in (18_000, 36_000, 120_000):
        document, (turn,) = generated("common-words:10").make(Room(count, tokens), random.Random(1), 0.5)
        assert 0.9 * tokens <= count(document) <= tokens
        counted = Counter(re.findall(r"\d+\. (\w+)", document))
        assert Counter(counted.values()) == {30: 10, 3: len(counted) - 10}
        assert {word for word, times in counted.items() if times == 30} == set(turn.answers) <= set(vocabulary())
        assert (set(counted) <= set(vocabulary())) == (tokens == 18_000)  # made-up words only where the log's are too few


def test_made_up_words_do_not_run_out() -> None:
    words = list(islice(made_up(random.Random(0)), 30_000))
    assert len({*words, *vocabulary()}) == len(words) + len(vocabulary())
    assert all(re.fullmatch("[a-z]{3,16}", word) for word in words)


@pytest.mark.parametrize("wanted", [1, 3, 10, 20])
@pytest.mark.parametrize("tokens", [1700, 3500])
def test_the_words_asked_for_are_more_frequent_than_any_other(wanted: int, tokens: int) -> None:
    for seed in range(8):
        document, (turn,) = generated(f"frequent-words:{wanted}").make(Room(count, tokens), random.Random(seed), 0.5)
        counted = Counter(word for word in document.split() if word != "....")
        least = min(counted[word] for word in turn.answers)
        assert all(times < least for word, times in counted.items() if word not in turn.answers)
        assert len(set(turn.answers)) == wanted and 0.97 * tokens < count(document) <= tokens


def test_samples_that_results_were_made_with_stay_as_they_are() -> None:
    def short(spec: str, seed: int, tokens: int = 2000) -> str:
        return sha256(repr(generated(spec).make(Room(count, tokens), random.Random(seed), 0.5)).encode()).hexdigest()[:8]

    assert short("common-words", 1) == "7b6e9d48" and short("common-words", 1, 18_000) == "53b1087f"
    assert short("frequent-words", 1) == "4af3d9ff" and short("json-kv", 1) == "a7503972"


@pytest.mark.parametrize("digits, tokens", [(2, 1700), (2, 8000), (3, 8000), (3, 60_000)])
def test_short_keys_fill_their_room(digits: int, tokens: int) -> None:
    document, (turn,) = generated(f"json-kv:{digits}").make(Room(count, tokens), random.Random(1), 0.5)
    assert 0.98 * tokens < count(document) <= tokens
    pairs = json.loads(document)
    assert len(pairs) == document.count(":") and all(len(value) == digits for value in pairs.values())
    lengths = Counter(map(len, pairs))
    assert set(lengths) <= {digits, digits + 1} and (len(lengths) == 1 or lengths[digits] == 16**digits)
    asked = re.search(r'"(\w+)"', turn.question)
    assert asked and pairs[asked[1]] == turn.answers[0]


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

"""`kvrecall.ask`: the document is read once, answers are those that each question gets alone, mistakes are told first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import kvrecall
from kvrecall import engine
from kvrecall.core.errors import ContextLengthError, InputFileError, ParameterError, UnknownNameError
from kvrecall.engine.document import Chat, Document
from kvrecall.engine.prompts import DocumentPrompt, next_prompt
from tests.backends.models import tiny
from tests.engine.users import in_threads
from tests.tiny import WORDS, tiny_tokenizer

TEXT = "the red boat . harbour text " * 25
QUESTIONS = ["the red boat", "harbour", "text : boat"]
METHOD = kvrecall.ParisKV(top_k=20, sink_tokens=4, local_tokens=16, update_interval=8, full_attention_threshold=0)
SAMPLED: dict[str, Any] = {"max_new_tokens": 5, "temperature": 0.3, "seed": 5}


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("llama", vocab_size=len(WORDS), max_position_embeddings=2048, initializer_range=0.3)


@pytest.fixture(scope="module", params=[True, False], ids=["chat template", "plain text"])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return tiny_tokenizer() if request.param else tiny_tokenizer(None)


def counted(model: Any) -> tuple[list[int], Callable[[], None]]:
    """Tokens of each call of the model from here on."""
    sizes: list[int] = []
    hook = model.model.register_forward_pre_hook(
        lambda _, args, kwargs: sizes.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    return sizes, hook.remove


def test_answers_are_those_of_generate_on_the_whole_prompt(model: Any, tokenizer: Any) -> None:
    sizes, remove = counted(model)
    answers = kvrecall.ask(model, tokenizer, TEXT, QUESTIONS, method=METHOD, **SAMPLED)
    remove()
    assert sum(size for size in sizes if size > 40) == len(DocumentPrompt.of(tokenizer, TEXT).prefix)  # once
    assert [answer.question for answer in answers] == QUESTIONS and len({tuple(answer.tokens) for answer in answers}) > 1
    for answer in answers:
        ids = DocumentPrompt.of(tokenizer, TEXT).ask(answer.question)
        alone = engine.generate(model, tokenizer, torch.tensor([ids]), METHOD, **SAMPLED)
        assert answer.tokens == alone.new_tokens[0] and str(answer) == answer.text == (alone.texts or [])[0]
        assert answer.prompt_tokens == len(ids) and answer.first_token_seconds > 0
        assert (answer.stats.total.counters.searches > 0) == (len(answer.tokens) > 1)


def test_an_answer_is_shown_in_a_line_and_in_a_notebook(model: Any, tokenizer: Any) -> None:
    (answer,) = kvrecall.ask(model, tokenizer, TEXT, QUESTIONS[:1], method=METHOD, **SAMPLED)
    count = f"{len(answer.tokens)} tokens behind {answer.prompt_tokens:,})"
    assert repr(answer) == f"Answer({answer.text!r}, {count}"
    long = replace(answer, text="harbour " * 50)
    assert len(repr(long)) < 100 and repr(long).startswith("Answer('harbour harbour") and repr(long).endswith(f"…', {count}")
    shown = answer._repr_markdown_()
    assert shown.startswith(f"**{answer.question}**\n\n{answer.text}\n\n*{answer.prompt_tokens:,} tokens read, ")


def test_pieces_come_as_they_are_made_and_every_question_s_are_its_answer(model: Any) -> None:
    pieces: list[tuple[int, str]] = []
    ended: list[int] = []
    read: list[tuple[int, int]] = []
    answers = kvrecall.ask(
        model, tiny_tokenizer(), TEXT, QUESTIONS, method=METHOD, max_new_tokens=12, temperature=0.5, seed=3, chunk_tokens=50,
        on_prefill=lambda done, total: read.append((done, total)), on_text=lambda number, text: pieces.append((number, text)),
        on_answer=lambda number, answer: ended.append(number),
    )  # fmt: skip
    for number, answer in enumerate(answers):
        assert "".join(text for of, text in pieces if of == number) == answer.text
    first = [next(place for place, (of, _) in enumerate(pieces) if of == number) for number in range(3)]
    last = [max(place for place, (of, _) in enumerate(pieces) if of == number) for number in range(3)]
    assert max(first) < min(last)  # side by side
    assert sorted(ended) == [0, 1, 2] and read[0][0] == 0 and read[-1][0] == read[-1][1] and len(read) > 3


def test_more_questions_than_are_decoded_together(model: Any) -> None:
    tokenizer, questions = tiny_tokenizer(), ["the", "red", "boat", "text", "harbour"]
    together = kvrecall.ask(model, tokenizer, TEXT, questions, method=METHOD, **SAMPLED)
    its = engine.Engine.of(model)
    before, its.max_sequences = its.max_sequences, 2
    try:
        few = kvrecall.ask(model, tokenizer, TEXT, questions, method=METHOD, **SAMPLED)
    finally:
        its.max_sequences = before
    assert [answer.tokens for answer in few] == [answer.tokens for answer in together]


def test_a_cache_is_asked_and_stays_as_it_is(model: Any) -> None:
    tokenizer = tiny_tokenizer()
    prefix = torch.tensor([DocumentPrompt.of(tokenizer, TEXT).prefix])
    cache = kvrecall.RetrievalCache(model.config, METHOD)
    engine.prefill(model, prefix, cache)
    fresh = kvrecall.ask(model, tokenizer, TEXT, QUESTIONS, method=METHOD, **SAMPLED)
    for _ in range(2):
        answers = kvrecall.ask(model, tokenizer, cache, QUESTIONS, **SAMPLED)
        assert [answer.tokens for answer in answers] == [answer.tokens for answer in fresh]
    assert cache.get_seq_length() == prefix.shape[1] and torch.equal(cache.tokens.ids(), prefix)  # type: ignore[arg-type]
    full = kvrecall.ask(model, tokenizer, cache, "the boat", method="full", max_new_tokens=2)
    assert full[0].stats.method == "full" and cache.method is METHOD


def test_the_method_is_a_name_with_settings_or_a_method(model: Any) -> None:
    tokenizer = tiny_tokenizer()
    named = kvrecall.ask(model, tokenizer, TEXT, "boat", method="pariskv", settings={"top_k": 3}, max_new_tokens=1)
    assert named[0].stats.method == "pariskv"
    with pytest.raises(UnknownNameError, match="topk"):
        kvrecall.ask(model, tokenizer, TEXT, "boat", method="pariskv", settings={"topk": 3})
    with pytest.raises(ParameterError, match="settings: expected a method's name to go with them, got 'ParisKV'"):
        kvrecall.ask(model, tokenizer, TEXT, "boat", method=METHOD, settings={"top_k": 3})


class Uncalled(torch.nn.Module):
    """Stands in front of a model's layers, none of which may be called."""

    def forward(self, *_: Any, **__: Any) -> None:
        raise AssertionError("the model was called")


@pytest.mark.parametrize(("wrong", "message"), [
    ({"document": " \n"}, "document: expected some text"),
    ({"document": []}, "document: expected at least one text, got 'none'"),
    ({"document": b"boat"}, "document: expected a text or a list of texts, got 'bytes'"),
    ({"document": "log.sesion"}, r"document: expected a text, got .what looks like a file's name.*pathlib\.Path"),
    ({"document": "/data/sessions/log.session"}, "what looks like a file's name"),
    ({"document": [TEXT, "notes/b.md"]}, "what looks like a file's name"),
    ({"document": "file.txt"}, "the name of a file, 'file.txt'"),
    ({"document": [TEXT, "folder"]}, "the name of a folder, 'folder'"),
    ({"document": Path("none.txt")}, "none.txt: cannot be read"),
    ({"document": [Path("folder")]}, "folder: cannot be read"),
    ({"questions": ["boat", "file.txt"]}, r"questions\[1\]: expected a text, got .the name of a file"),
    ({"tokenizer": None}, "tokenizer: expected the model's tokenizer, got 'NoneType'"),
    ({"max_new_tokens": 2.5}, "max_new_tokens: expected an integer >= 1, got 2.5"),
    ({"max_new_tokens": True}, "max_new_tokens: expected an integer >= 1, got True"),
    ({"temperature": "0"}, "temperature: expected a finite number"),
    ({"seed": "x"}, "seed: expected an integer, got 'x'"),
    ({"seed": 1 << 70}, "seed: expected an integer of 64 bits"),
    ({"questions": []}, "questions: expected at least one text"),
    ({"questions": "  "}, "question: expected some text"),
    ({"questions": ["boat", ""]}, r"questions\[1\]: expected some text"),
    ({"questions": [1]}, "questions: expected a text or a list of texts"),
    ({"method": 3}, "method: expected a kvrecall method or its name, got 3"),
    ({"method": "pariskb"}, "unknown method 'pariskb'"),
    ({"max_new_tokens": 0}, "max_new_tokens: expected an integer >= 1"),
    ({"temperature": float("nan")}, "temperature: expected a finite number"),
    ({"top_p": 0.0}, "top_p"),
    ({"max_new_tokens": 4000}, "max_new_tokens: expected less than"),
    ({"document": "boat " * 3000}, "document: expected at most"),
    ({"questions": ["boat", "boat " * 3000]}, "question: expected at most"),
])  # fmt: skip
def test_mistakes_are_told_before_anything_is_computed(
    model: Any, wrong: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file.txt").write_text(TEXT, encoding="utf-8")
    Path("folder").mkdir()
    given = {"tokenizer": tiny_tokenizer(), "document": TEXT, "questions": QUESTIONS, **wrong}
    remove = model.model.register_forward_pre_hook(Uncalled())
    try:
        with pytest.raises((ParameterError, ContextLengthError, UnknownNameError, InputFileError), match=message):
            kvrecall.ask(model, **given)
    finally:
        remove.remove()


def test_a_path_is_read(model: Any, tmp_path: Path) -> None:
    first, second = tmp_path / "a.txt", tmp_path / "b.txt"
    first.write_text(TEXT, encoding="utf-8")
    second.write_text("harbour", encoding="utf-8")
    for given, texts in ((first, TEXT), ([first, second], [TEXT, "harbour"]), ([TEXT, second], [TEXT, "harbour"])):
        read, told = (engine.Document.of(model, tiny_tokenizer(), each, method=METHOD) for each in (given, texts))
        assert read.prompt.prefix == told.prompt.prefix and read.about == told.about
    for text in ("boat", "report.txt is red", "log.sesion\n", "the red boat/harbour", "Why?"):
        assert engine.Document.of(model, tiny_tokenizer(), text, method=METHOD).tokens > 2


@pytest.mark.parametrize("saved", [True, False], ids=["session", "cache"])
def test_a_document_with_questions_and_answers_in_it_is_no_conversation(
    model: Any, tokenizer: Any, saved: bool, tmp_path: Path
) -> None:
    document = engine.Document.of(model, tokenizer, "Question: boat\nAnswer: the red boat . " * 20, method=METHOD)
    answer = document.ask("boat", **SAMPLED)[0]
    document.save(tmp_path / "faq")
    again = kvrecall.ask(model, tokenizer, tmp_path / "faq" if saved else document.cache, "boat", **SAMPLED)[0]
    assert (again.prompt_tokens, again.tokens) == (answer.prompt_tokens, answer.tokens)
    talk = engine.Chat(document)
    talk.say("boat", max_new_tokens=3)
    talk.save(tmp_path / "talk")
    held = talk.cache if saved is False else tmp_path / "talk"
    ids = engine.Document.of(model, tokenizer, held).prompt.ask("red")  # type: ignore[arg-type]
    assert ids == next_prompt(tokenizer, talk._said, "red")  # type: ignore[arg-type]
    if talk.cache is not None:  # back at the document
        talk.cache.crop(document.tokens - talk.cache.get_seq_length())
        assert engine.Document.of(model, tokenizer, talk.cache).prompt.ask("red") == document.prompt.ask("red")


def test_a_cache_that_is_no_document_is_refused(model: Any) -> None:
    tokenizer = tiny_tokenizer()
    empty = kvrecall.RetrievalCache(model.config, METHOD)
    with pytest.raises(ParameterError, match="got 'an empty one'"):
        kvrecall.ask(model, tokenizer, empty, "boat")
    two = kvrecall.RetrievalCache(model.config, METHOD)
    engine.prefill(model, torch.tensor([[5, 6], [7, 8]]), two)
    with pytest.raises(ParameterError, match="got '2 sequences'"):
        kvrecall.ask(model, tokenizer, two, "boat")
    padded = kvrecall.RetrievalCache(model.config, METHOD)
    engine.prefill(model, torch.tensor([[0, 6, 7]]), padded, attention_mask=torch.tensor([[0, 1, 1]]))
    with pytest.raises(ParameterError, match="without padding"):
        kvrecall.ask(model, tokenizer, padded, "boat")


def test_one_question_that_fails_ends_the_others_and_the_model_is_as_before(model: Any) -> None:
    tokenizer = tiny_tokenizer()

    def tell(number: int, text: str) -> None:
        raise KeyError(number)

    document = engine.Document.of(model, tokenizer, TEXT, method=METHOD)
    with pytest.raises(KeyError):
        document.ask(QUESTIONS, max_new_tokens=12, temperature=0.5, seed=1, on_text=tell)
    assert document.cache.get_seq_length() == document.tokens
    again = document.ask(QUESTIONS[:1], **SAMPLED)
    assert again[0].tokens == kvrecall.ask(model, tokenizer, TEXT, QUESTIONS[0], method=METHOD, **SAMPLED)[0].tokens


@pytest.mark.model
def test_a_real_model_answers_several_questions(smollm2: tuple[Any, Any]) -> None:
    text = "The harbour log.\n\nOn Monday the red boat left for Kiel.\n\nOn Tuesday Anna Berg became archivist."
    first, second = kvrecall.ask(*smollm2, text, ["Where did the red boat go?", "Who became archivist?"], max_new_tokens=24)
    assert "Kiel" in first.text and "Anna" in second.text


def test_threads_that_ask_an_unread_document_wait_for_the_one_that_reads(model: Any) -> None:
    tokenizer = tiny_tokenizer()
    want = [answer.tokens for answer in kvrecall.ask(model, tokenizer, TEXT, QUESTIONS, method=METHOD, **SAMPLED)]
    document = Document.of(model, tokenizer, TEXT, method=METHOD)
    sizes, remove = counted(model)
    asks = [lambda text=text: document.ask(text, chunk_tokens=32, **SAMPLED)[0].tokens for text in QUESTIONS]
    assert in_threads(asks) == want
    remove()
    assert sum(size for size in sizes if size == 32) <= document.tokens  # read once


def test_threads_take_turns_in_one_conversation(model: Any) -> None:
    chat = Chat(Document.of(model, tiny_tokenizer(), TEXT, method=METHOD))
    answers = in_threads([lambda text=text: chat.say(text, max_new_tokens=3) for text in QUESTIONS])
    lengths = sorted(answer.prompt_tokens for answer in answers)
    assert len(set(lengths)) == 3 and chat.tokens > lengths[-1] > lengths[0] + 3

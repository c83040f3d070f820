"""A document that is read once and asked any number of questions, each on a fork of its cache; a conversation about it."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvrecall import methods
from kvrecall.backends.transformers import RetrievalCache
from kvrecall.backends.transformers.families import context_limit
from kvrecall.core.errors import ContextLengthError, ParameterError, SessionError
from kvrecall.core.texts import check_no_name, read_text
from kvrecall.engine.exact import Drafts, check_exact
from kvrecall.engine.generate_args import check_sampling, check_tokenizer
from kvrecall.engine.job import GenerateResult
from kvrecall.engine.prefill import Progress, prefill
from kvrecall.engine.prompts import INSTRUCTION, DocumentPrompt, next_prompt
from kvrecall.engine.request import Engine, Request, generate
from kvrecall.layer.stats import CacheStats
from kvrecall.methods.base import Method
from kvrecall.methods.settings import settings_of

if TYPE_CHECKING:
    from kvrecall.backends.transformers.session import SessionInfo

MAX_NEW_TOKENS = 128

FIRST_WORDS = 120
"""First characters of a document that its session stores."""

Source = str | PathLike[str] | Sequence[str | PathLike[str]] | RetrievalCache
"""A text or a text file's path, several of them in order, the folder of a saved session, or a cache with one sequence."""

_READ = (
    "Give the text itself, or the path of an existing file as a pathlib.Path, which is read; a session's folder must exist. "
    "A text of one word may end with a line break."
)

OnText = Callable[[int, str], None]
"""Called with (number of the question from 0, piece of its answer)."""


_SHOWN = 60
"""Characters of an answer in its `repr`."""


@dataclass(frozen=True, eq=False, repr=False)
class Answer:
    """An answer; `str` gives its text, and a notebook shows it with its question.

    tokens: its ids. prompt_tokens: of document and question.
    first_token_seconds: from the start of reading the question to the first token. decode_seconds: of the other tokens.
    Questions that are answered together share both. stats: of the question's cache. drafts: as in `GenerateResult`.
    """

    question: str
    text: str
    tokens: list[int]
    prompt_tokens: int
    first_token_seconds: float
    decode_seconds: float
    stats: CacheStats
    drafts: Drafts | None = None

    @staticmethod
    def of(question: str, prompt_tokens: int, result: GenerateResult) -> Answer:
        """The answer to a question, from the result for its prompt."""
        return Answer(
            question, (result.texts or [""])[0], result.new_tokens[0], prompt_tokens, result.prefill_seconds,
            result.decode_seconds, result.cache.stats(), result.drafts,
        )  # fmt: skip

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        text = self.text if len(self.text) <= _SHOWN else f"{self.text[: _SHOWN - 1]}…"
        return f"Answer({text!r}, {len(self.tokens)} tokens behind {self.prompt_tokens:,})"

    def _repr_markdown_(self) -> str:
        """What a notebook shows: question, answer, and a line about the work."""
        attended = self.stats.total.counters.attended_per_step
        seconds = self.first_token_seconds + self.decode_seconds
        work = f"{self.prompt_tokens:,} tokens read, {attended:,.0f} attended per step and KV head, answered in {seconds:.1f} s"
        return f"**{self.question}**\n\n{self.text}\n\n*{work}*"


class Document:
    """A document and its cache. `read` fills the cache; `ask` answers on forks and does not change it.

    Several threads may ask. The first one reads the document, the others wait for it.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, cache: RetrievalCache, prompt: DocumentPrompt
    ) -> None:
        """Use `Document.of`."""
        self.model, self.tokenizer, self.cache, self.prompt = model, tokenizer, cache, prompt
        cache.tokenizer = tokenizer
        self.read_seconds = 0.0
        """Seconds for reading, or for loading a session."""
        self.about: dict[str, Any] = {}
        """The session's `about`."""
        self._reading = threading.RLock()

    @classmethod
    def of(
        cls, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, document: Source, *,
        method: Method | str | None = None, settings: Mapping[str, Any] | None = None, instruction: str = INSTRUCTION,
        host_rows: Literal["plain", "fp8"] | None = None,
    ) -> Document:  # fmt: skip
        """A document; parameters as in `kvrecall.ask`. host_rows: as in `RetrievalCache`; None: "plain" for a text, and what a
        session or cache has. Reads no text yet.

        Raises ParameterError for an empty document, for a text that is a file's name, and for a session or cache with other
        rows than `host_rows`; InputFileError for a path that cannot be read as UTF-8 text; and the errors of
        `RetrievalCache.load` for a session.
        """
        check_tokenizer(tokenizer, needed=True)
        chosen, start = chosen_method(method, settings), time.perf_counter()
        about: dict[str, Any] = {}
        if _is_folder(document):
            about, document = _loaded(model, Path(document))  # type: ignore[arg-type]
        if isinstance(document, RetrievalCache):
            if host_rows not in (None, document.host_rows):
                remedy = "Leave it out, or load the session by RetrievalCache.load(…, host_rows=…)."
                raise ParameterError("host_rows", repr(document.host_rows), host_rows, remedy)
            held = _held(document)
            cache = document if chosen in (None, document.method) else document.fork(chosen)
            made = cls(model, tokenizer, cache, DocumentPrompt.behind(tokenizer, held, instruction, document.tokens.answered))
            made.about, made.read_seconds = about, time.perf_counter() - start
            return made
        texts = _document_texts(document)
        cache = RetrievalCache(model.config, chosen or methods.recommended(), host_rows=host_rows or "plain")
        made = cls(model, tokenizer, cache, DocumentPrompt.of(tokenizer, texts, instruction))
        made.about = {"first_words": " ".join(texts[0][: 8 * FIRST_WORDS].split())[:FIRST_WORDS], "tokens": made.tokens}
        return made

    @property
    def tokens(self) -> int:
        """Tokens of the document."""
        return len(self.prompt.prefix)

    def check(self, questions: Sequence[str], max_new_tokens: int = MAX_NEW_TOKENS) -> list[list[int]]:
        """Ids of each question after the document. Raises ParameterError or ContextLengthError for an impossible one."""
        for number, question in enumerate(questions):
            name = "question" if len(questions) == 1 else f"questions[{number}]"
            _some(name, question)
            check_no_name(name, question, "Give its content, or write the question as a sentence.", existing=True)
        limit = context_limit(self.model.config)
        return [self.prompt.question(each, max_new_tokens=max_new_tokens, limit_tokens=limit) for each in questions]

    def read(
        self, *, chunk_tokens: int | None = None, on_progress: Progress | None = None, expect_tokens: int | None = None
    ) -> None:
        """Reads the tokens that the cache does not hold yet. Parameters as in `engine.prefill`. Continues after an
        interruption."""
        with self._reading:
            if self.cache.get_seq_length() == self.tokens:
                return
            start = time.perf_counter()
            prefill(
                self.model, _batch(self.model, self.prompt.prefix), self.cache, chunk_tokens=chunk_tokens,
                on_progress=on_progress, expect_tokens=expect_tokens,
            )  # fmt: skip
            self.read_seconds += time.perf_counter() - start

    def ask(
        self,
        questions: str | Sequence[str],
        *,
        max_new_tokens: int = MAX_NEW_TOKENS,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int | None = None,
        exact: bool = False,
        chunk_tokens: int | None = None,
        on_prefill: Progress | None = None,
        on_text: OnText | None = None,
        on_answer: Callable[[int, Answer], None] | None = None,
    ) -> list[Answer]:
        """Reads the document if needed, and answers; parameters and errors as in `kvrecall.ask`."""
        questions = _texts("questions", questions)
        check_sampling(max_new_tokens, temperature, top_p, seed)
        behind = self.check(questions, max_new_tokens)
        if exact:
            check_exact(self.cache)
        longest = self.tokens + max(map(len, behind), default=0) + max_new_tokens
        self.read(chunk_tokens=chunk_tokens, on_progress=on_prefill, expect_tokens=longest)
        most = Engine.of(self.model).max_sequences
        waiting = deque(enumerate(behind))
        running: dict[int, tuple[Request, Iterator[list[int]]]] = {}
        answers: dict[int, Answer] = {}
        try:
            while waiting or running:
                while waiting and len(running) < most:
                    number, ids = waiting.popleft()
                    request = Engine.of(self.model).submit(
                        self.tokenizer, _batch(self.model, self.prompt.prefix + ids), self.cache.fork(),
                        max_new_tokens=max_new_tokens, chunk_tokens=chunk_tokens, temperature=temperature, top_p=top_p,
                        seed=seed, exact=exact, on_text=None if on_text is None else partial(on_text, number),
                    )  # fmt: skip
                    running[number] = request, iter(request)
                for number, (request, steps) in list(running.items()):
                    # One token of each in turn, so that all are reported as they come.
                    if next(steps, None) is None:
                        prompt_tokens = self.tokens + len(behind[number])
                        answers[number] = Answer.of(questions[number], prompt_tokens, request.result())
                        del running[number]
                        if on_answer is not None:
                            on_answer(number, answers[number])
        finally:
            for request, _ in running.values():
                request.cancel()
        return [answers[number] for number in range(len(questions))]

    def save(self, folder: str | PathLike[str], rows: Literal["plain", "fp8"] = "plain", **about: Any) -> SessionInfo:
        """Saves the cache as a session, also for a partly read document; `resume` continues it.

        rows: see `RetrievalCache.save`, whose errors are raised. about: more entries for the session's `about`.
        """
        from kvrecall.backends.transformers.session import save

        self.about |= about
        return save(self.cache, os.fspath(folder), rows, self.about)

    def resume(self, folder: str | PathLike[str]) -> int:
        """Loads a session of this document, or of a first part of it; returns the number of tokens.

        Raises SessionError, and changes nothing, for a session of another document, method, form of rows, or model.
        """
        start = time.perf_counter()
        cache = RetrievalCache.load(Path(folder), self.model.config, model=self.model)
        held = _held(cache)
        if cache.method != self.cache.method:
            remedy = "Give that method with its settings, or another folder."
            raise SessionError("method", _named(cache.method), _named(self.cache.method), remedy)
        if cache.host_rows != self.cache.host_rows:
            remedy = "Give that form of rows in host memory, or another folder."
            raise SessionError("host_rows", repr(cache.host_rows), repr(self.cache.host_rows), remedy)
        if held != self.prompt.prefix[: len(held)]:
            remedy = "Give the same files in the same order, perhaps with more behind them, or another folder."
            raise SessionError("document", "one that begins with what the session holds", "another", remedy)
        with self._reading:
            self.cache, self.read_seconds = cache, time.perf_counter() - start
        return len(held)


def ask(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    document: Source,
    questions: str | Sequence[str],
    *,
    method: Method | str | None = None,
    settings: Mapping[str, Any] | None = None,
    instruction: str = INSTRUCTION,
    max_new_tokens: int = MAX_NEW_TOKENS,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int | None = None,
    exact: bool = False,
    chunk_tokens: int | None = None,
    on_prefill: Progress | None = None,
    on_text: OnText | None = None,
    on_answer: Callable[[int, Answer], None] | None = None,
) -> list[Answer]:
    """Reads a document once and answers questions about it, each on a fork of its cache, all decoded together.

    document: a text or a file's path (`pathlib.Path`: UTF-8, or PDF and others, `core.documents`), several of them in order,
    the folder of a saved session, or a cache with one sequence; sessions and caches are not changed. A string that names an
    existing folder is a session; one that names a file, or looks so, is refused. questions: one or several. Each gets the same
    answer as alone.

    method: a method, or its text (`kvrecall.methods.parse`) with `settings` for its parameters; by default that of the cache
    or session, else `kvrecall.methods.recommended()`. instruction: how to answer, between document and question. The
    tokenizer's chat template is used if it has one. temperature: 0 decodes greedily. seed: makes sampling repeatable, the same
    for every question. exact: answers are those of full attention up to rounding, as in `engine.generate`.
    max_new_tokens: per answer. chunk_tokens: of the document per call of the model; None: depends on the device.

    on_prefill is called with (tokens read, tokens of the document); on_text with (number of the question from 0, piece of its
    answer); on_answer with (number, complete answer).

    Raises ParameterError, before anything is computed, for an empty document or question, for file names in place of texts, no
    questions, and impossible settings; InputFileError for a file that cannot be read; ContextLengthError if document, question
    and answer exceed the model's context; SessionError for a folder without a session of this model, or with one of a partly
    read document.
    """
    read = Document.of(model, tokenizer, document, method=method, settings=settings, instruction=instruction)
    return read.ask(
        questions, max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed, exact=exact,
        chunk_tokens=chunk_tokens, on_prefill=on_prefill, on_text=on_text, on_answer=on_answer,
    )  # fmt: skip


def chosen_method(method: Method | str | None, settings: Mapping[str, Any] | None = None) -> Method | None:
    """The method of `method` and `settings`; None without a method. Raises ParameterError or UnknownNameError."""
    if isinstance(method, str):
        return methods.parse(method).method(**(settings or {}))
    if settings:
        expected, got = "a method's name to go with them", "none" if method is None else type(method).__name__
        raise ParameterError("settings", expected, got, "Give method=NAME, or set them where the method is made.")
    if method is not None and not isinstance(method, Method):
        raise ParameterError("method", "a kvrecall method or its name", method, "For example kvrecall.methods.recommended().")
    return method


def _is_folder(document: object) -> bool:
    try:
        return isinstance(document, str | PathLike) and os.path.isdir(document)
    except ValueError:  # a text with a NUL character
        return False


def _loaded(model: PreTrainedModel, folder: Path) -> tuple[dict[str, Any], RetrievalCache]:
    """(a session's `about`, its cache). Raises SessionError also for a partly read document."""
    from kvrecall.backends.transformers.session import read_info

    info = read_info(folder)
    whole = info.about.get("tokens", 0)
    if isinstance(whole, int) and info.tokens < whole:
        remedy = "Go on with `kvrecall read` and the same files."
        raise SessionError(folder, f"a document that was read whole ({whole:,} tokens)", f"{info.tokens:,} of them", remedy)
    return info.about, RetrievalCache.load(folder, model.config, model=model)


def _named(method: Method) -> str:
    settings = ", ".join(f"{name}={value!r}" for name, value in settings_of(method).items())
    return f"{method.name}({settings})"


def _texts(name: str, given: object) -> list[str]:
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, Sequence) or not all(isinstance(each, str) for each in texts):
        raise ParameterError(name, "a text or a list of texts", type(given).__name__, "Read files and decode bytes first.")
    if not texts:
        raise ParameterError(name, "at least one text", "none", "Give one.")
    return list(texts)


def _document_texts(given: object) -> list[str]:
    """The texts of a document; files are read. Raises ParameterError and InputFileError."""
    several = [given] if isinstance(given, str | PathLike) else given
    if not isinstance(several, Sequence) or not all(isinstance(each, str | PathLike) for each in several):
        return _texts("document", given)  # which refuses it
    for text in several:
        if isinstance(text, str):
            _some("document", text)
            check_no_name("document", text, _READ)
    return _texts("document", [text if isinstance(text, str) else read_text(text) for text in several])


def _some(name: str, text: str) -> None:
    if not text.strip():
        raise ParameterError(name, "some text", text[:40], "Give one that is not empty.")


def _held(cache: RetrievalCache) -> list[int]:
    """Ids of a cache's tokens. Raises ParameterError unless they are one known sequence."""
    ids, sequences = cache.tokens.ids(), cache.sequences
    if ids is None or sequences != 1 or not cache.tokens.known:
        got = f"{sequences} sequences" if sequences else "an empty one"
        got = "tokens that are embeddings or images" if sequences and not cache.tokens.known else got
        raise ParameterError("document", "a cache that holds one sequence of known tokens", got, "Prefill it with a document.")
    if cache.valid is not None and not bool(cache.valid.all()):
        raise ParameterError("document", "a cache without padding", "one with padding", "Prefill it with one document.")
    return ids[0].tolist()


class Chat:
    """Turns on a fork of a document's cache, which holds the whole conversation.

    A turn that fails or is interrupted leaves the conversation as it was before. Threads take turns.
    """

    def __init__(self, document: Document) -> None:
        """document: read already, or at the first turn."""
        self.document = document
        self.cache: RetrievalCache | None = None
        """The conversation's cache; None before the first turn."""
        self._said: list[int] | None = None
        self._turn = threading.RLock()

    @property
    def tokens(self) -> int:
        """Tokens of the document and the conversation."""
        return self.document.tokens if self._said is None else len(self._said)

    def say(
        self, question: str, *, max_new_tokens: int = MAX_NEW_TOKENS, temperature: float = 0.0, top_p: float = 1.0,
        seed: int | None = None, exact: bool = False, chunk_tokens: int | None = None,
        on_text: Callable[[str], None] | None = None,
    ) -> Answer:  # fmt: skip
        """The answer to one more question; parameters and errors as in `kvrecall.ask`. on_text gets its pieces."""
        with self._turn:
            document = self.document
            behind = document.check([question], max_new_tokens if self._said is None else 1)
            if exact:
                check_exact(document.cache)
            if self._said is None:
                document.read(chunk_tokens=chunk_tokens)
                ids = document.prompt.prefix + behind[0]
            else:
                ids = next_prompt(document.tokenizer, self._said, question)
                limit = context_limit(document.model.config)
                if limit and len(ids) + max_new_tokens > limit:
                    raise ContextLengthError("conversation", max(0, limit - max_new_tokens), len(ids))
            cache = (self.cache or document.cache).fork()  # dropped if the turn fails
            result = generate(
                document.model, document.tokenizer, _batch(document.model, ids), cache, max_new_tokens=max_new_tokens,
                chunk_tokens=chunk_tokens, temperature=temperature, top_p=top_p, seed=seed, exact=exact, on_text=on_text,
            )  # fmt: skip
            self.cache, self._said = cache, ids + result.new_tokens[0]
            return Answer.of(question, len(ids), result)

    def save(self, folder: str | PathLike[str]) -> SessionInfo:
        """Saves document and conversation as a session for `kvrecall.ask` or another chat."""
        from kvrecall.backends.transformers.session import save

        if self.cache is None or self._said is None:
            self.document.read()
            return self.document.save(folder)
        prefill(self.document.model, _batch(self.document.model, self._said), self.cache)  # the last token has not been fed yet
        return save(self.cache, folder, about=self.document.about | {"tokens": len(self._said)})  # type: ignore[arg-type]


def _batch(model: PreTrainedModel, ids: list[int]) -> Tensor:
    """Token ids as a batch of one on the model's device."""
    return torch.tensor([ids], device=model.device, dtype=torch.int64)

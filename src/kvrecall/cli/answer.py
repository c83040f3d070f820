"""One answer, from prompt ids to text on the screen."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from kvrecall.cli.screen import printable
from kvrecall.cli.session import Session, token_bar


def answer(
    session: Session,
    ids: list[int],
    cache: Any,
    *,
    max_new_tokens: int,
    chunk_tokens: int | None,
    temperature: float = 0.0,
    seed: int | None = None,
    quiet: bool = False,
    write: Callable[[str], None] | None = None,
) -> Any:
    """Runs the engine under two bars, prefill and decode; returns its result.

    With `write` the text is passed on as it comes, instead of the second bar.
    """
    from kvrecall import engine

    with ExitStack() as bars:
        on_prefill = bars.enter_context(token_bar("reading", quiet))
        on_token: Callable[[int], None] | None = None

        def decode(count: int) -> None:
            nonlocal on_token
            if on_token is None:
                bars.close()  # two live displays cannot share a screen
                update = bars.enter_context(token_bar("answering", quiet or write is not None))
                on_token = lambda n: update(n, max_new_tokens)  # noqa: E731
            on_token(count)

        return engine.generate(
            session.model,
            session.tokenizer,
            session.tensor(ids),
            cache,
            max_new_tokens=max_new_tokens,
            chunk_tokens=chunk_tokens,
            on_prefill=on_prefill,
            on_text=None if write is None else lambda text: write(printable(text)),
            on_token=decode,
            temperature=temperature,
            seed=seed,
        )


class InTurn:
    """Writes the answers to several questions in order; text of a later answer waits for the earlier ones."""

    def __init__(self, questions: Sequence[str]) -> None:
        """With several questions, each is written above its answer."""
        self._questions, self._turn = questions, 0
        self._pieces: list[list[str]] = [[] for _ in questions]
        self._ended = [False for _ in questions]
        self._head()

    def write(self, number: int, text: str) -> None:
        """Adds a piece of the answer to question `number`."""
        if number == self._turn:
            to_stdout(printable(text))
        else:
            self._pieces[number].append(text)

    def end(self, number: int, _: object) -> None:
        """Ends the answer to question `number`."""
        self._ended[number] = True
        while self._turn < len(self._ended) and self._ended[self._turn]:
            to_stdout("\n")
            self._turn += 1
            if self._turn < len(self._ended):
                self._head()
                to_stdout(printable("".join(self._pieces[self._turn])))

    def _head(self) -> None:
        if len(self._questions) > 1:
            gap = "\n" if self._turn else ""
            to_stdout(f"{gap}{printable(self._questions[self._turn])}\n")


def to_stdout(text: str) -> None:
    """Writes a piece of an answer at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def summary(session: Session, method: Any, prompt_tokens: int, result: Any, cache: Any) -> dict[str, Any]:
    """The JSON result of an answer. settings: of the method, as far as they differ from its defaults."""
    from kvrecall.methods.settings import settings_of

    return {
        "answer": result.texts[0],
        "model": session.name,
        "method": method.name,
        "settings": settings_of(method),
        "prompt_tokens": prompt_tokens,
        "new_tokens": len(result.new_tokens[0]),
        "load_seconds": round(session.load_seconds, 3),
        "prefill_seconds": round(result.prefill_seconds, 3),
        "decode_seconds": round(result.decode_seconds, 3),
        "stats": cache.stats().to_dict(),
    }

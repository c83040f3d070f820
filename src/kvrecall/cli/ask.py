"""`kvrecall ask FILE…|SESSION QUESTION…`"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from kvrecall.cli.options import non_empty
from kvrecall.cli.screen import answers_table, details, printable, stats_table, to_stdout
from kvrecall.cli.session import Choices, opened
from kvrecall.cli.verb import Result, verb
from kvrecall.core.errors import ParameterError
from kvrecall.core.texts import check_no_name


@verb
def ask(
    sources_and_questions: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE…|SESSION QUESTION…",
            help="Text files, UTF-8, in order, or the folder of a saved session; then one or several questions.",
        ),
    ],
    choices: Choices,
) -> Result:
    """Answer questions about text files, which are read once, or about a saved session, which is not read again."""
    # What is cheap to get wrong is checked before the weights are loaded.
    sources, questions = split(sources_and_questions)
    with opened(sources, choices, lambda document: document.check(questions, choices.max_new_tokens)) as found:
        shown = InTurn(questions)
        answers = found.document.ask(
            questions,
            **choices.sampling(),
            on_text=shown.write,
            on_answer=shown.end,
        )
        told = found.told() | {"answers": [answer_told(answer) for answer in answers]}
    _show(told)
    return told


def split(arguments: list[str]) -> tuple[list[Path], list[str]]:
    """The files or session that come first, and the questions. Raises ParameterError for a question that is none."""
    count = 1
    while count < len(arguments) and _is_file(arguments[count]):
        count += 1
    questions = [non_empty(question, "question") for question in arguments[count:]]
    for question in questions:
        check_no_name("question", question, "Files come before the first question; a folder must be a session, alone.")
    if not questions:
        raise ParameterError("question", "one or several behind the files", "none", "Ask something.")
    return [Path(argument) for argument in arguments[:count]], questions


def _is_file(argument: str) -> bool:
    """Whether it is standard input, or something that exists and is no folder."""
    return argument == "-" or (os.path.exists(argument) and not os.path.isdir(argument))


def answer_told(answer: Any) -> Result:
    """What --json says about an answer to a question about a document."""
    return {
        "question": answer.question,
        "answer": answer.text,
        "prompt_tokens": answer.prompt_tokens,
        "new_tokens": len(answer.tokens),
        "first_token_seconds": round(answer.first_token_seconds, 3),
        "decode_seconds": round(answer.decode_seconds, 3),
        "stats": answer.stats.to_dict(),
    }


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


def _show(told: Result) -> None:
    if len(told["answers"]) > 1:
        details().print(answers_table(told))
    else:
        details().print(stats_table({**told, **told["answers"][0]}))

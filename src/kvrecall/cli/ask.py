"""`kvrecall ask FILE…|SESSION QUESTION…` and `kvrecall chat FILE|SESSION`"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any

import typer

from kvrecall.cli import options
from kvrecall.cli.options import non_empty
from kvrecall.cli.screen import (
    answers_table,
    details,
    facts_table,
    note,
    notes,
    printable,
    seconds,
    size,
    stats_table,
    to_stdout,
)
from kvrecall.cli.session import DocumentContext, DocumentOptions, open_document
from kvrecall.cli.session_store import disk_bytes
from kvrecall.cli.verb import Result, verb
from kvrecall.core.errors import InputFileError, KVRecallError, ParameterError
from kvrecall.core.texts import check_no_name


@verb
def ask(
    sources_and_questions: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE…|SESSION QUESTION…",
            help="Text files, PDF, Word or HTML, in order, or a saved session's folder; then one or several questions.",
        ),
    ],
    *,
    stats: options.Stats = False,
    choices: DocumentOptions,
) -> Result:
    """Answer questions about text files, which are read once, or about a saved session, which is not read again."""
    # What is cheap to get wrong is checked before the weights are loaded.
    sources, questions = split(sources_and_questions)
    with open_document(sources, choices, lambda document: document.check(questions, choices.max_new_tokens)) as context:
        output = OrderedOutput(questions)
        answers = context.document.ask(questions, **choices.sampling(), on_text=output.write, on_answer=output.end)
        result = context.to_dict() | {"answers": [answer_row(answer) for answer in answers]}
    if len(answers) > 1:
        details().print(answers_table(result))
    elif not stats:
        details().print(facts_table(result | result["answers"][0]))
    for row in result["answers"] if stats else ():
        details().print(stats_table(result | row))
    return result


def split(arguments: list[str]) -> tuple[list[Path], list[str]]:
    """The files or session that come first, and the questions. Raises ParameterError for a question that is none."""
    sources = arguments[:1] + list(takewhile(_is_file, arguments[1:]))
    questions = [non_empty(question, "question") for question in arguments[len(sources) :]]
    for question in questions:
        check_no_name("question", question, "Files come before the first question; a folder must be a session, alone.")
    if not questions:
        raise ParameterError("question", "one or several behind the files", "none", "Ask something.")
    return [Path(source) for source in sources], questions


def _is_file(argument: str) -> bool:
    """Whether it is standard input, or something that exists and is no folder."""
    return argument == "-" or (os.path.exists(argument) and not os.path.isdir(argument))


def answer_row(answer: Any) -> Result:
    """What --json says about an answer to a question about a document."""
    return {
        "question": answer.question,
        "answer": answer.text,
        "prompt_tokens": answer.prompt_tokens,
        "new_tokens": len(answer.tokens),
        "first_token_seconds": round(answer.first_token_seconds, 3),
        "decode_seconds": round(answer.decode_seconds, 3),
        "drafts": None if answer.drafts is None else asdict(answer.drafts),
        "stats": answer.stats.to_dict(),
    }


class OrderedOutput:
    """Writes the answers to several questions in order; text of a later answer waits for the earlier ones."""

    def __init__(self, questions: Sequence[str]) -> None:
        """With several questions, each is written above its answer."""
        self._questions, self._current = questions, 0
        self._texts = [""] * len(questions)
        self._ends: set[int] = set()
        self._head()

    def write(self, number: int, text: str) -> None:
        """Adds a piece of the answer to question `number`."""
        if number == self._current:
            to_stdout(printable(text))
        else:
            self._texts[number] += text

    def end(self, number: int, _: object) -> None:
        """Ends the answer to question `number`."""
        self._ends.add(number)
        while self._current in self._ends:
            to_stdout("\n")
            self._current += 1
            if self._current < len(self._questions):
                self._head()
                to_stdout(printable(self._texts[self._current]))

    def _head(self) -> None:
        if len(self._questions) > 1:
            gap = "\n" if self._current else ""
            to_stdout(f"{gap}{printable(self._questions[self._current])}\n")


INSTRUCTION = "Answer from the text above."
HELP = "Ask something. /save FOLDER saves document and conversation as a session, /quit ends."


@dataclass(frozen=True)
class ChatOptions(DocumentOptions):
    """Answers in a conversation may be longer."""

    max_new_tokens: options.MaxNewTokens = 512


@verb
def chat(
    source: Annotated[Path, typer.Argument(metavar="FILE|SESSION", help="Text file, PDF, Word or HTML, or a saved session.")],
    choices: ChatOptions,
) -> Result:
    """Talk about a text file or a saved session; one question per line of standard input. /save FOLDER, /quit."""

    def check(document: Any) -> None:
        document.check(["?"], choices.max_new_tokens)

    with open_document([source], choices, check, instruction=INSTRUCTION) as context:
        return _chat(context, source, choices.sampling() | {"chunk_tokens": choices.chunk_tokens})


def _chat(context: DocumentContext, source: Path, limits: dict[str, Any]) -> Result:
    from kvrecall.engine import Chat

    conversation, interactive = Chat(context.document), _in_terminal()
    answers: list[Result] = []
    sessions: list[str] = []
    if interactive:
        notes().print(HELP)
    while (line := _line(interactive)) is not None:
        command, _, argument = line.partition(" ")
        if not line:
            continue
        if command == "/quit":
            break
        try:
            if command == "/save":
                folder = Path(argument.strip() or source)
                if not argument.strip() and not source.is_dir():
                    notes().print("note: /save needs a folder: /save notes.session")
                    continue
                info = conversation.save(folder)
                sessions.append(str(folder))
                note(f"saved: {info.tokens:,} tokens, {size(disk_bytes(folder))} in {folder}")
            elif command[:1] == "/":
                note(f"note: {command} is unknown. {HELP}")
            else:
                answer = conversation.say(line, on_text=lambda text: to_stdout(printable(text)), **limits)
                answers.append(answer_row(answer))
                to_stdout("\n")
                rate = f"{len(answer.tokens) / answer.decode_seconds:.1f} tokens/s" if answer.decode_seconds else "—"
                first = f"first token {seconds(answer.first_token_seconds)}"
                details().print(f"{first} · {rate} · {conversation.tokens:,} tokens", style="dim")
        except KeyboardInterrupt:
            if not interactive:
                raise
            notes().print("\nstopped; the conversation is as it was before this question")
        except (KVRecallError, OSError) as error:
            if not interactive or isinstance(error, BrokenPipeError):
                raise
            notes().print(f"error: {error}", style="red", soft_wrap=True)  # a person can do something else
    return context.to_dict() | {"answers": answers, "tokens": conversation.tokens, "saved": sessions}


def _in_terminal() -> bool:
    """Whether a person types the questions, who sees a prompt and may stop an answer."""
    return sys.stdin.isatty()


def _line(interactive: bool) -> str | None:
    """The next line of standard input; None at its end."""
    try:
        return input("> " if interactive else "").strip()
    except EOFError:
        return None
    except UnicodeDecodeError as error:
        raise InputFileError("standard input", f"is not UTF-8 text (byte {error.start:,})") from None

"""Sets of reasoning problems (AIME, MATH-500, GPQA) from local files, one JSON object per line as they are published."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvrecall.core.errors import InputFileError, ParameterError, UnknownNameError
from kvrecall.core.extras import require_math_verify
from kvrecall.core.whole_files import parse_json
from kvrecall.evaluate.answers import boxed, final_choice
from kvrecall.evaluate.expressions import same_answer, stated

_BOX = "Please reason step by step, and put your final answer within \\boxed{}."
_CHOOSE = "Please reason step by step, and put the letter of your choice within \\boxed{}."
_WRONG = ("Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")


@dataclass(frozen=True)
class Problem:
    """A problem's prompt and its answer: a number, an expression, or a letter (`choice`)."""

    prompt: str
    answer: str
    choice: bool = False

    def extract(self, text: str) -> str | None:
        """The answer that a text gives: the content of its last box, or else what it states. None if it gives none."""
        return final_choice(text) if self.choice else boxed(text) or stated(text)

    def same(self, given: str | None) -> bool:
        """Whether an answer is the right one."""
        return given == self.answer if self.choice else same_answer(given, self.answer)

    def right(self, text: str) -> bool:
        """Whether a text ends in the right answer."""
        return self.same(self.extract(text))


def _aime(row: dict[str, Any], _: random.Random) -> Problem:
    """AIME: `problem` (or `question`) and `answer`, an integer from 0 to 999."""
    answer = str(_field(row, "answer", "Answer")).strip()
    if not re.fullmatch("[0-9]{1,20}", answer) or int(answer) > 999:
        raise ValueError(f"answer: expected an integer from 0 to 999, got {answer!r}")
    return Problem(f"{_field(row, 'problem', 'question', 'Problem', 'Question')}\n{_BOX}", str(int(answer)))


def _math(row: dict[str, Any], _: random.Random) -> Problem:
    """MATH-500: `problem` and `answer`, LaTeX."""
    return Problem(f"{_field(row, 'problem', 'question')}\n{_BOX}", str(_field(row, "answer")))


def _gpqa(row: dict[str, Any], draw: random.Random) -> Problem:
    """GPQA: `Question`, `Correct Answer` and `Incorrect Answer 1` to `3`, in an order that the seed decides."""
    options = [(str(_field(row, "Correct Answer")).strip(), True)]
    options += [(str(_field(row, name)).strip(), False) for name in _WRONG]
    draw.shuffle(options)
    listed = "\n".join(f"({letter}) {text}" for letter, (text, _) in zip("ABCD", options, strict=True))
    right = next(letter for letter, (_, true) in zip("ABCD", options, strict=True) if true)
    return Problem(f"{_field(row, 'Question', 'question')}\n\n{listed}\n\n{_CHOOSE}", right, choice=True)


CHOICES = "gpqa"
"""The format whose answers are letters; those of all others need math-verify."""
FORMATS: dict[str, Callable[[dict[str, Any], random.Random], Problem]] = {"aime": _aime, "math500": _math, CHOICES: _gpqa}


def read_problems(spec: str, seed: int) -> list[Problem]:
    """The problems of `format:file`. Raises UnknownNameError, ParameterError, InputFileError (with the line)."""
    name, colon, file = spec.partition(":")
    if name not in FORMATS:
        raise UnknownNameError("format", name, FORMATS)
    if not colon or not file:
        raise ParameterError(f"task {name}", f"a file of problems, as {name}:FILE.jsonl", spec, "Nothing is downloaded.")
    found = []
    for number, line in enumerate(problem_text(spec).split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = parse_json(line)
            if not isinstance(row, dict):
                raise ValueError(f"expected a JSON object, got {line[:40]!r}")
            found.append(FORMATS[name](row, random.Random(f"{seed}/{name}/{number}")))
        except ValueError as error:
            # The message without the parser's own line number: it sees one line, and always says 1.
            said = f"{error.msg} (column {error.colno:,})" if isinstance(error, json.JSONDecodeError) else error
            remedy = f"docs/guide/evaluate.md shows a line of {name}."
            raise InputFileError(file, f"line {number:,}: {said}", remedy) from None
    if not found:
        raise InputFileError(file, "holds no problem", "Give one JSON object per line.")
    return found


def require_scorer(spec: str) -> None:
    """Raises MissingPackageError if the package that scores a task's answers is missing."""
    name = spec.partition(":")[0]
    if name in FORMATS and name != CHOICES:
        require_math_verify()


def problem_text(spec: str) -> str:
    """The text of a task's file. Raises InputFileError."""
    path = Path(spec.partition(":")[2])
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputFileError(path, f"cannot be read ({error.strerror})", "Give a file with one JSON object per line.") from None
    except UnicodeDecodeError as error:
        raise InputFileError(path, f"is not UTF-8 text (byte {error.start:,})", "Give JSON lines.") from None


def _field(row: dict[str, Any], *names: str) -> Any:
    for name in names:
        if name in row:
            if isinstance(row[name], str) and not row[name].strip():
                raise ValueError(f"{name}: expected some text, got nothing")
            if isinstance(row[name], bool) or not isinstance(row[name], str | int | float):
                raise ValueError(f"{name}: expected text or a number, got {repr(row[name])[:40]}")
            return row[name]
    raise ValueError(f"expected a field {' or '.join(repr(name) for name in names)}, got {', '.join(map(repr, row)) or 'none'}")

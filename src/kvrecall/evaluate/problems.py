"""Tasks from local files: sets of reasoning problems (AIME, MATH-500, GPQA), one JSON object per line as they are published.

The answer of a text is its last \\boxed{…}, or the letter of a choice; `expressions` has the mathematical answers. math-verify
covers neither: it makes one set of several boxes, and takes "A boat sails" for the choice A.
"""

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
from kvrecall.evaluate.expressions import same_answer, stated

_BOX = "Please reason step by step, and put your final answer within \\boxed{}."
_CHOOSE = "Please reason step by step, and put the letter of your choice within \\boxed{}."
_RIGHT, _WRONG = "Correct Answer", ("Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")

_WRAPPED = re.compile(r"\\(?:text(?:bf|it|rm|sf)?|math(?:bf|it|rm|sf)|mbox|boldsymbol|bm)\s*\{([^{}]*)\}|\\?\$|\\[()\[\]]|\*\*")

_LINE_CHARACTERS = 1000
"""Of the end of an answer without a box, in which its last line is looked for."""


@dataclass(frozen=True)
class Problem:
    """A problem's prompt and its answer: a number, an expression, or a letter (`choice`)."""

    prompt: str
    answer: str
    choice: bool = False

    def extract(self, text: str) -> str | None:
        """The answer in a text: the content of its last box, or else what it states. None without one."""
        return final_choice(text) if self.choice else boxed(text) or stated(text)

    def same(self, answer: str | None) -> bool:
        """Whether an answer is the right one."""
        return answer == self.answer if self.choice else same_answer(answer, self.answer)

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
    options = [(str(_field(row, name)).strip(), name == _RIGHT) for name in (_RIGHT, *_WRONG)]
    draw.shuffle(options)
    lines = "\n".join(f"({letter}) {text}" for letter, (text, _) in zip("ABCD", options, strict=True))
    answer = next(letter for letter, (_, right) in zip("ABCD", options, strict=True) if right)
    return Problem(f"{_field(row, 'Question', 'question')}\n\n{lines}\n\n{_CHOOSE}", answer, choice=True)


DRIFT = "drift"
"""Name of the task of long generation."""
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
    problems = []
    for number, line in enumerate(task_text(spec).split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = parse_json(line)
            if not isinstance(row, dict):
                raise ValueError(f"expected a JSON object, got {line[:40]!r}")
            problems.append(FORMATS[name](row, random.Random(f"{seed}/{name}/{number}")))
        except ValueError as error:
            # The message without the parser's own line number: it sees one line, and always says 1.
            mistake = f"{error.msg} (column {error.colno:,})" if isinstance(error, json.JSONDecodeError) else error
            remedy = f"docs/guide/evaluate.md shows a line of {name}."
            raise InputFileError(file, f"line {number:,}: {mistake}", remedy) from None
    if not problems:
        raise InputFileError(file, "holds no problem", "Give one JSON object per line.")
    return problems


def require_scorer(spec: str) -> None:
    """Raises MissingPackageError if the package that scores a task's answers is missing."""
    name = spec.partition(":")[0]
    if name in FORMATS and name != CHOICES:
        require_math_verify()


def task_text(spec: str) -> str:
    """The text of a task's file, of problems or to be decoded. Raises InputFileError."""
    path = Path(spec.partition(":")[2])
    remedy = f"{DRIFT}:FILE takes a text file in UTF-8." if is_drift(spec) else "Give a file with one JSON object per line."
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputFileError(path, f"cannot be read ({error.strerror})", remedy) from None
    except UnicodeDecodeError as error:
        raise InputFileError(path, f"is not UTF-8 text (byte {error.start:,})", remedy) from None


def is_drift(spec: str) -> bool:
    """Whether a task's spec names long generation (`drift.py`, which imports torch, as this file does not)."""
    return spec.partition(":")[0] == DRIFT


def _field(row: dict[str, Any], *names: str) -> Any:
    for name in names:
        if name in row:
            if isinstance(row[name], str) and not row[name].strip():
                raise ValueError(f"{name}: expected some text, got nothing")
            if isinstance(row[name], bool) or not isinstance(row[name], str | int | float):
                raise ValueError(f"{name}: expected text or a number, got {repr(row[name])[:40]}")
            return row[name]
    raise ValueError(f"expected a field {' or '.join(repr(name) for name in names)}, got {', '.join(map(repr, row)) or 'none'}")


def boxed(text: str) -> str | None:
    """What stands in the last \\boxed{…} or \\fbox{…} that is closed and not empty, braces matched; None if there is none."""
    starts: list[int] = []  # of the insides of open braces, -1 for those of no box
    last, content = -1, None
    for match in re.finditer(r"(\\(?:boxed|fbox)\s*)?\{|\}", text):
        if match[0] != "}":
            starts.append(match.end() if match[1] else -1)
        elif starts and (start := starts.pop()) > last and (inside := text[start : match.start()].strip()):
            last, content = start, inside
    return content


def final_choice(text: str, letters: str = "ABCD") -> str | None:
    """The letter that the last box begins with; without a box, that of a last line such as "B" or "The answer is (B).".

    In doubt there is none ("A or B", a letter in the middle of a text): a score may be too low, not too high. letters: of the
    choices that there are, upper case; only in a box or in brackets may the text have it in lower case.
    """
    either = f"[{letters}{letters.lower()}]"
    box = boxed(text)
    if box is not None:
        no_other = rf"(?!.*(?<!\w)(?:[(\[]{either}[)\]]|[{letters}][.)]))"
        pattern = rf"({either})|(?:[(\[]\s*({either})\s*[)\]]|([{letters}])[.)]){no_other}(?:[\s\\].*)?"
        match = re.fullmatch(pattern, _plain(box).strip(" ."), re.DOTALL)
    else:
        line = _plain(text[-_LINE_CHARACTERS:]).rstrip().rpartition("\n")[2].strip()
        claim = r"(?:.*\b(?i:answer)(?:\s+is|\s+must\s+be|\s*:)\s*(?:option\s+)?)?"
        match = re.fullmatch(rf"""{claim}["'“]?(?:[(\[]({either})[)\]]|([{letters}]))["'”]?[.)]?""", line)
    return next(letter for letter in match.groups() if letter).upper() if match else None


def _plain(text: str) -> str:
    """A text without its typography: \\textbf{…}, **…**, dollar signs, \\(…\\)."""
    return _WRAPPED.sub(lambda match: match[1] or "", text)

"""Mathematical answers by math-verify, in a process of its own.

    python expressions.py    reads JSON requests from standard input, one per line, and prints a reply to each

sympy computes whatever a model has written: `9^{9^{9^9}}` never ends, keeps Python's lock and sees no signal, so that the
timeouts of math-verify do not help. A process that takes longer than SECONDS is ended, and there is no answer. The next request
starts another one.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from contextlib import suppress
from select import select
from threading import Lock
from typing import Any

SECONDS = 20
"""Wall-clock time of one request. The first one takes a second, for importing sympy."""
LONGEST = 300
"""Characters of an answer that is compared by its meaning: right ones are shorter, and what loops is longer."""
_TAIL = 1000
"""Characters at the end of a text in which an answer is looked for."""
_NO_MODULE = 3
"""Exit code where math-verify cannot be imported."""
_GROUPED = re.compile(r"(?<=\d)(?:\\[,;:! ]|\{,\}|~|\s)+(?=\d{3}(?!\d))")
"""Thin spaces between digits, which math-verify takes for a product."""


def stated(text: str) -> str | None:
    """What a text without a box gives, as math-verify finds it. None if it finds nothing."""
    return _ask(find=text[-_TAIL:])


def same_answer(answer: str | None, expected: str) -> bool:
    """Whether two answers in LaTeX mean the same; `expected` decides the form, as in `math_verify.verify`.

    Answers longer than LONGEST are equal only letter for letter, and so are those that math-verify cannot read.
    """
    if answer is None or not answer.strip():
        return False
    if answer.strip() == expected.strip():
        return True
    if max(len(answer), len(expected)) > LONGEST:
        return False
    if answer.isdecimal() and expected.isdecimal():  # most answers, and no reason for a process
        return int(answer) == int(expected)
    return bool(_ask(given=answer, expected=expected))


class _Judge:
    """The process, from the first request on."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = Lock()

    def ask(self, request: dict[str, str]) -> Any:
        """The reply; None if there is none. Raises MissingPackageError."""
        from kvrecall.core.errors import MissingPackageError

        with self._lock:
            if self._process is None:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
                )
            process = self._process
            assert process.stdin is not None and process.stdout is not None
            with suppress(OSError):  # it has ended, so there is nothing to read
                process.stdin.write(f"{json.dumps(request)}\n".encode())
                process.stdin.flush()
            in_time = bool(select([process.stdout], [], [], SECONDS)[0])
            line = process.stdout.readline() if in_time else b""
            if line:
                return json.loads(line)
            self._process = None
            if not in_time:
                process.kill()
            code = process.wait()
        if code == _NO_MODULE:  # every answer would count as wrong
            raise MissingPackageError("math-verify", "eval", expected="a release that can be imported", got="an error")
        return None


_judge = _Judge()


def _after_fork() -> None:
    """A fork of this process starts its own."""
    global _judge
    _judge = _Judge()


os.register_at_fork(after_in_child=_after_fork)


def _ask(**request: str) -> Any:
    """The reply; None if there is none. Raises MissingPackageError."""
    from kvrecall.core.extras import require_math_verify

    require_math_verify()
    return _judge.ask(request)


def _reply(request: dict[str, str]) -> Any:
    try:
        from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
    except ImportError:
        sys.exit(_NO_MODULE)
    latex = LatexExtractionConfig()
    if "find" in request:
        # Bold would be a part of the answer, and the minus sign of typography none.
        text = request["find"].replace("**", " ").replace("−", "-")
        answers = parse(text, [latex, ExprExtractionConfig()], parsing_timeout=None)  # pyright: ignore[reportArgumentType]
        return answers[-1] if answers else None
    boxes = (rf"\boxed{{{_GROUPED.sub('', request[name])}}}" for name in ("expected", "given"))
    expected, given = (parse(box, [latex], parsing_timeout=None) for box in boxes)  # pyright: ignore[reportArgumentType]
    return verify(expected, given, timeout_seconds=None)


if __name__ == "__main__":
    replies, sys.stdout = sys.stdout, sys.stderr  # what a library prints would be taken for a reply
    for line in sys.stdin:
        print(json.dumps(_reply(json.loads(line))), file=replies, flush=True)

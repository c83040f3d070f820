"""Mathematical answers by math-verify, in a process of its own.

    python expressions.py    reads one JSON request from standard input, and prints its reply

sympy computes whatever a model has written: `9^{9^{9^9}}` never ends, keeps Python's lock and sees no signal, so that the
timeouts of math-verify do not help. A process that takes longer than SECONDS is ended, and there is no answer.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

SECONDS = 20
"""Wall-clock time of one request. A usual one takes a second, for importing sympy."""
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


def same_answer(given: str | None, expected: str) -> bool:
    """Whether two answers in LaTeX mean the same; `expected` decides the form, as in `math_verify.verify`.

    Answers longer than LONGEST are equal only letter for letter, and so are those that math-verify cannot read.
    """
    if given is None or not given.strip():
        return False
    if given.strip() == expected.strip():
        return True
    if max(len(given), len(expected)) > LONGEST:
        return False
    if given.isdecimal() and expected.isdecimal():  # most answers, and no reason for a process
        return int(given) == int(expected)
    return bool(_ask(given=given, expected=expected))


def _ask(**request: str) -> Any:
    """The reply; None if there is none. Raises MissingPackageError."""
    from kvrecall.core.errors import MissingPackageError
    from kvrecall.core.extras import require_math_verify

    require_math_verify()
    command = [sys.executable, "-P", __file__]
    try:
        run = subprocess.run(command, input=json.dumps(request), capture_output=True, encoding="ascii", timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return None
    if run.returncode == _NO_MODULE:  # every answer would count as wrong
        raise MissingPackageError("math-verify", "eval", expected="a release that can be imported", got="an error")
    return json.loads(run.stdout) if run.returncode == 0 else None


def _reply(request: dict[str, str]) -> Any:
    try:
        from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
    except ImportError:
        sys.exit(_NO_MODULE)
    latex = LatexExtractionConfig()
    if "find" in request:
        # Bold would be a part of the answer, and the minus sign of typography none.
        text = request["find"].replace("**", " ").replace("−", "-")
        found = parse(text, [latex, ExprExtractionConfig()], parsing_timeout=None)  # pyright: ignore[reportArgumentType]
        return found[-1] if found else None
    boxes = (rf"\boxed{{{_GROUPED.sub('', request[name])}}}" for name in ("expected", "given"))
    expected, given = (parse(box, [latex], parsing_timeout=None) for box in boxes)  # pyright: ignore[reportArgumentType]
    return verify(expected, given, timeout_seconds=None)


if __name__ == "__main__":
    print(json.dumps(_reply(json.load(sys.stdin))))

"""Mathematical answers by math-verify: what a text without a box gives, and whether an answer equals the expected one.

    python -m kvrecall.evaluate.expressions    reads one JSON request per line, and writes one JSON reply per line

math-verify reads LaTeX (fractions, roots, intervals, sets, matrices, units, percent, `x =`) and compares by algebra.
sympy computes whatever a model has written: `9^{9^{9^9}}` never ends, keeps Python's lock and sees no signal, so that the
timeouts of math-verify do not help. A child process does the work instead. Any thread may ask; a request that takes longer
than SECONDS ends the child and counts as no answer.

What math-verify does not know is added here: digits grouped by thin spaces, a base as a subscript (4210_5 is not 4210), and
that a number inside an expression is not the answer of a text.
"""

from __future__ import annotations

import atexit
import faulthandler
import json
import os
import re
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

from kvrecall.core.errors import MissingPackageError
from kvrecall.core.extras import require_math_verify

SECONDS = 10
"""Wall-clock time of one request. A usual one takes a hundredth of a second."""
LONGEST = 300
"""Characters of an answer that is compared by its meaning: right ones are shorter, and what loops is longer."""
_TAIL = 1000
"""Characters at the end of a text in which an answer is looked for."""
_GROUPED = re.compile(r"(?<=\d)(?:\\[,;:! ]|\{,\}|~|\s)+(?=\d{3}(?!\d))")
_BOLD = re.compile(r"\\(?:boldsymbol|bm|textbf)\s*\{((?:[^{}]|\{[^{}]*\})*)\}|(?<!\w)\*\*|\*\*(?!\w)|</?answer>")
# Words that change the number before them; math-verify drops them as units.
_WORD = (
    r"(?:(?i:dozen|score|pair|hundred|thousand|[mbtr]+illion|half|third|quarter|tenth|kilo)s?"
    r"|mod(?:ulo)?|base|binary|squared|cubed|factorial|repeating|recurring|pi|[inxyz])\b"
)
_CHANGE = re.compile(
    r"\d\s*_\s*\{?\s*(?:\\[a-z]+\s*\{)?\s*(\w+)"  # the base of 4210_5 and 12_{\text{nine}}
    rf"|\d\s*(?:\\[ ,;]|~)?\\(?:text|mathrm|mbox)\s*\{{\s*\\?({_WORD})"
)
# What makes a number a part of an expression: before it and after it.
_BEFORE = re.compile(r"""(?x)
    (?: [\w^_] | [±√/]\s* | \\[A-Za-z]+\s* | \+/?-\s* | \d[.,:] | \d[^\S\n]+ | \w\( | [(\[{][^()\[\]{}]*,\s*
    | (?:[\d)}\]=]|\b[A-Za-z])\s*[-–+*/^·×]+\s* | (?i:minus|negative|plus|times|over|mod(?:ulo)?|base)\s+ )\Z""")
_AFTER = re.compile(
    r"\s*(?:\^(?!\s*\{?\s*\\circ)|[!_/(*×·√π]|\\(?!text|mathrm|circ|[)\]])|[-+]\s*[\w\\])"
    rf"|[inxyzk](?![a-zA-Z])|[ (-]*(?:in )?{_WORD}"
)


class _Child:
    """The process that does the work; started at the first request, and again after one that ended it."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._process: subprocess.Popen[str] | None = None
        self._owner = 0

    def ask(self, **request: Any) -> Any:
        """The reply, None if the request took too long or ended the process."""
        with self._lock:
            process = self._running()
            assert process.stdin is not None and process.stdout is not None
            try:
                process.stdin.write(json.dumps(request | {"seconds": SECONDS}) + "\n")
                process.stdin.flush()
                line = process.stdout.readline()
            except BaseException as error:  # an interrupt leaves a reply unread, which is not the next request's
                self._end()
                if isinstance(error, OSError):
                    return None
                raise
            if line:
                return json.loads(line)
            self._end()
            return None

    def _running(self) -> subprocess.Popen[str]:
        if self._owner != os.getpid():  # a fork has its parent's pipes
            self._process, self._owner = None, os.getpid()
        if self._process is None:
            require_math_verify()
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "kvrecall.evaluate.expressions"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, encoding="ascii",
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [_HOME, os.environ.get("PYTHONPATH")]))},
            )  # fmt: skip
            atexit.register(self._process.kill)
            assert self._process.stdout is not None
            if not self._process.stdout.readline():  # without it, every answer would count as wrong
                self._end()
                raise MissingPackageError("math-verify", "eval", expected="a release that can be imported", got="an error")
        return self._process

    def _end(self) -> None:
        if self._process is not None:
            atexit.unregister(self._process.kill)
            self._process.kill()
            self._process.wait()
            self._process = None


_HOME = str(Path(__file__).parents[2])
_CHILD = _Child()


def stated(text: str) -> str | None:
    """What a text without a box gives, as LaTeX: the expression after "answer", or else the last one. None if there is none,
    and if it is a number that stands in a larger expression outside dollar signs, as in 2^{10} or (3, 4)."""
    text = re.sub(r"=\s*-\s+(?=[\d.\\])", "= -", _plain(text[-_TAIL:]))
    return _CHILD.ask(find=text)


def same_answer(given: str | None, expected: str) -> bool:
    """Whether two answers in LaTeX mean the same; `expected` decides the form, as in `math_verify.verify`.

    Words after a number are units and dropped (`12\\text{ cm}`), percent signs may be left out, and floats are rounded to six
    digits. Answers longer than LONGEST are equal only letter for letter, and so are those that math-verify cannot read.
    """
    if given is None or not given.strip():
        return False
    if given.strip() == expected.strip():
        return True
    if max(len(given), len(expected)) > LONGEST or _CHANGE.findall(given) != _CHANGE.findall(expected):
        return False
    return bool(_CHILD.ask(given=_plain(given), expected=_plain(expected)))


def _plain(text: str) -> str:
    """A text without bold, with ASCII minus signs, and with digits that are not grouped by TeX's spaces."""
    return _GROUPED.sub("", _BOLD.sub(lambda match: f" {match[1] or ''} ", text.replace("−", "-")))


@cache
def _math() -> Any:
    import math_verify

    return math_verify


def _find(text: str) -> str | None:
    math = _math()
    latex, plain = math.LatexExtractionConfig(), math.ExprExtractionConfig()
    found = math.parse(text, [latex, plain], parsing_timeout=None)
    if not found:
        return None
    said = found[-1]
    if found != math.parse(text, [latex], parsing_timeout=None):  # a number or arithmetic outside dollar signs
        *_, number = re.finditer(r"-?(?:[\d,]*\d)?\.?\d+", text)
        start = number.start()
        if text.endswith(said, 0, number.end()):
            start = number.end() - len(said)
        if _BEFORE.search(text[:start]) or _AFTER.match(text[number.end() :]):
            return None
        if number[0].strip("-.").replace(",", "") not in said:  # a later number, which math-verify could not read
            return None
    return said


def _equal(given: str, expected: str) -> bool:
    math = _math()
    latex = [math.LatexExtractionConfig()]
    gold, got = (math.parse(f"\\boxed{{{text}}}", latex, parsing_timeout=None) for text in (expected, given))
    return math.verify(gold, got, timeout_seconds=None)


def main() -> None:
    """Replies to requests until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when it ends
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    _math()
    print("ready", file=replies, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        # Ends the process from outside Python's lock; a signal would wait for it.
        faulthandler.dump_traceback_later(request["seconds"], exit=True)
        try:
            reply = _find(request["find"]) if "find" in request else _equal(request["given"], request["expected"])
        except Exception:  # whatever sympy or a parser makes of it, it is no answer
            reply = None
        faulthandler.cancel_dump_traceback_later()
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    main()

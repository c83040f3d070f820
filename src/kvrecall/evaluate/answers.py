"""The answer that a text ends in: \\boxed{…}, a number, or a letter; and whether it is the expected one."""

from __future__ import annotations

import re
from fractions import Fraction

_LETTER = re.compile(
    r"(?:answer|choice|option)\s*(?:is|:)?\s*:?\s*\**\s*\(?\s*([A-J])\s*\)?(?![\w])|^\s*\(?([A-J])\)?\s*[.:)]?\s*$",
    re.IGNORECASE | re.MULTILINE,
)
_NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?(?:/\d+)?")


def boxed(text: str) -> str | None:
    """What stands in the last \\boxed{…} or \\fbox{…}, braces matched; None if there is none that is closed."""
    for match in reversed(list(re.finditer(r"\\(?:boxed|fbox)\s*\{", text))):
        depth = 1
        for place in range(match.end(), len(text)):
            depth += {"{": 1, "}": -1}.get(text[place], 0)
            if not depth:
                return text[match.end() : place].strip()
    return None


def final_number(text: str) -> str | None:
    """The last box, or else the last number of a text."""
    found = boxed(text)
    if found is not None:
        return found
    numbers = _NUMBER.findall(text)
    return numbers[-1] if numbers else None


def final_choice(text: str) -> str | None:
    """The letter in the last box, or else of the last "answer is X" or of a line that is a letter; upper case."""
    found = boxed(text)
    if found is not None:
        letter = re.fullmatch(r"(?:\\(?:text|mathrm|mathbf)\s*\{)?\s*\(?([A-Ja-j])\)?\.?\s*\}?", found)
        return letter[1].upper() if letter else None
    matches = list(_LETTER.finditer(text))
    return (matches[-1][1] or matches[-1][2]).upper() if matches else None


def same_answer(given: str | None, expected: str) -> bool:
    """Whether two mathematical answers are equal: as numbers if both are, otherwise letter for letter after normalisation.

    Normalisation drops spaces, dollar signs, \\left and \\right, units in \\text, degree signs and a leading "x =", and writes
    \\dfrac as \\frac. Expressions that are equal only by algebra are told apart: no answer is accepted by mistake.
    """
    if given is None:
        return False
    left, right = _normal(given), _normal(expected)
    if left == right:
        return bool(left)
    numbers = _as_number(left), _as_number(right)
    return numbers[0] is not None and numbers[0] == numbers[1]


def _normal(text: str) -> str:
    text = text.strip().strip("$").rstrip(".")
    text = re.sub(r"\\(?:left|right|displaystyle|,|;|!|:| )", "", text)
    text = re.sub(r"\\[dt]frac", r"\\frac", text)
    text = re.sub(r"\\frac(\d)(\d)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\(?:text|mathrm|textbf|mbox)\s*\{\s*([^{}]*)\}", lambda m: m[1] if _alone(m, text) else "", text)
    text = re.sub(r"\^\s*\{?\s*\\circ\s*\}?|\\degree|\\%|%|\\\$", "", text)
    text = re.sub(r"^[A-Za-z]\s*=\s*", "", text.strip())
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)
    return re.sub(r"\s+", "", text)


def _alone(match: re.Match[str], text: str) -> bool:
    """Whether a \\text{…} is all there is: then it is the answer and not a unit."""
    return match[0].strip() == text.strip()


def _as_number(text: str) -> Fraction | None:
    fraction = re.fullmatch(r"(-?)\\frac\{(-?\d+)\}\{(-?\d+)\}", text)
    try:
        if fraction:
            value = Fraction(int(fraction[2]), int(fraction[3]))
            return -value if fraction[1] else value
        return Fraction(text)
    except (ValueError, ZeroDivisionError):
        return None

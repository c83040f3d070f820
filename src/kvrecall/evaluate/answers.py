"""The answer that a text ends in: \\boxed{…}, a number, or a letter; and whether it is the expected one.

In doubt there is no answer, or it is not the expected one: a score may be too low, not too high.
"""

from __future__ import annotations

import re
from fractions import Fraction
from functools import cache

_WRAPPED = re.compile(r"\\(?:text(?:bf|it|rm|sf)?|math(?:bf|it|rm|sf)|mbox)\s*\{([^{}]*)\}")
_NUMBER = re.compile(
    r"""
    (?:(?<![\w)}\]])[-+])?                                      # after a word or a bracket it is a dash or an operator
    (?: \\[dtc]?frac\{\d+\}\{\d+\}
      | (?:\d{1,3}(?:,\d{3})+(?!\d) | \d+)(?:\.\d+)?(?:/\d+)?    # a comma belongs to a number only between thousands
      | (?<![\w.])\.\d+ )
    """,
    re.VERBOSE,
)
# What makes a number a part of an expression: before it and after it. "the answer - 42" and "42 km/h" are none.
_BEFORE = re.compile(
    r"""(?: [\w^_/{√±] | \d[.,:] | \w[-–+] | \w\( | (?:[(\[]|\\\{)[^()\[\]{}]*,\s*
      | [\d)}\]]\s*[-–+*/^·×]+\s* | \b[A-Za-z]\s*[-+*]\s*
      | \\(?:times|cdot|div|pm|mp|sqrt|log|ln|sin|cos|tan|over|choose)\s* )$""",
    re.VERBOSE,
)
_AFTER = re.compile(
    r"""\s*(?: \^(?!\s*\{?\s*\\circ) | \\(?:times|cdot|sqrt|pi|log|ln|over|choose) | [/√π] | [*·×]\s*\w
      | [-+]\s*(?:[A-Za-z]\b|\\) ) | [inxyzk](?![A-Za-z])""",
    re.VERBOSE,
)
_UNIT = re.compile(
    r"""(?: (?<![_^])\\(?:text(?:bf|rm)?|mathrm|mbox)\s*
      \{(?!\s*[ei]\s*\}) (?![^{}]*\b(?:or|and|to|not|more|less|hundred|thousand|[mb]illion|dozen)\b) [^{}\d]*\}
      (?:\^\s*\{?\d\}?)?\s* )+$""",
    re.VERBOSE,
)


def boxed(text: str) -> str | None:
    """What stands in the last \\boxed{…} or \\fbox{…} that is closed and not empty, braces matched; None if there is none."""
    opened: list[int] = []  # where the insides of open braces begin, -1 for those of no box
    last, found = -1, None
    for match in re.finditer(r"(\\(?:boxed|fbox)\s*)?\{|\}", text):
        if match[0] != "}":
            opened.append(match.end() if match[1] else -1)
        elif opened and (start := opened.pop()) > last and (inside := text[start : match.start()].strip()):
            last, found = start, inside
    return found


def final_number(text: str) -> str | None:
    """The last box, or else the last number of a text; None if that is but a part of an expression, as in 2^{10} or (3, 4)."""
    found = boxed(text)
    if found is not None:
        return found
    text = re.sub(r"=\s*-\s*(?=[\d.\\])", "=-", _plain(text))
    numbers = list(_NUMBER.finditer(text))
    if not numbers:
        return None
    last = numbers[-1]
    part = _BEFORE.search(text[max(0, last.start() - 80) : last.start()]) or _AFTER.match(text, last.end())
    return None if part else last[0]


def final_choice(text: str, letters: str = "ABCD") -> str | None:
    """The letter in the last box, or else on a last line of its own, of the last "answer is X", or on a first line of its own.

    letters: of the choices that there are, upper case. Only in a box or in brackets may the text have it in lower case.
    """
    found = boxed(text)
    said, line = _patterns(letters)
    if found is not None:
        letter = re.fullmatch(rf"[(\[]?\s*([{letters}])\s*[)\]]?", _plain(found).strip(" .*"), re.IGNORECASE)
        return letter[1].upper() if letter else None
    text = _plain(text).strip()
    lines = text.split("\n")
    for match in (line.fullmatch(lines[-1].strip()), *reversed(list(said.finditer(text))), line.fullmatch(lines[0].strip())):
        if match:
            return (match[1] or match[2]).upper()
    return None


def same_answer(given: str | None, expected: str) -> bool:
    """Whether two mathematical answers are equal: as numbers if both are, otherwise letter for letter after normalisation.

    Normalisation drops spaces but for those between two numbers, dollar signs, \\left and \\right, commas and spaces between
    thousands, units in a \\text at the end, degree and percent signs and a leading "x =", and writes \\dfrac as \\frac.
    Expressions that are equal only by algebra are told apart: no answer is accepted by mistake.
    """
    if given is None:
        return False
    left, right = _normal(given), _normal(expected)
    if left == right:
        return bool(left)
    numbers = _as_number(left), _as_number(right)
    return numbers[0] is not None and numbers[0] == numbers[1]


@cache
def _patterns(letters: str) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Of "answer is X" and of a line that is a letter: group 1 in brackets, group 2 bare."""
    bracketed = rf"[(\[]\s*([{letters}{letters.lower()}])\s*[)\]]"
    bare = rf"""['"“‘*_]?([{letters}])"""
    # "A strong base", "C. elegans", "C-H", "A's": no choice. "A or B", "A, B and C": none that was made.
    no_word = r"""(?![\w/+=^&°–-]|['’]\w|\.[ \t]*[a-z]|[ \t]+(?!(?:because|since|as|due|based|given|which|and|but|so)\b)\w)"""
    no_list = rf"(?!\s*(?:,|/|&|\b(?:or|and)\b)\s*[(\[]?[{letters}]\b)"
    says = r"(?<!\bwrong\s)(?<!\bincorrect\s)\b(?:answer|choice|option)[*_]*\s*(?:\bis\b|:|=)"
    # Options that follow on lines of their own were not chosen.
    between = rf"(?:[*_:\s]*(?=[(\[*_]*[{letters}][)\]*_.]*[ \t]*$)|[*_: \t]*(?:(?:option|choice)\s+)?)"
    pattern = rf"(?i:{says}{between})(?:{bracketed}|{bare}{no_word}){no_list}"
    return re.compile(pattern, re.MULTILINE), re.compile(rf"{bracketed}[.]?|{bare}['\"”’*_]?[.)]?")


def _plain(text: str) -> str:
    """A text without its typography: \\textbf{…}, **…**, dollar signs, \\(…\\), separators of thousands that are not commas."""
    while (bare := _WRAPPED.sub(r"\1", text)) != text:
        text = bare
    text = re.sub(r"\\?\$|\\[()\[\]]|`|(?<!\w)\*\*|\*\*(?!\w)", "", text.replace("−", "-"))
    return re.sub(r"(?<=\d)(?:\{,\}|,\\!\s*|\\[,;:!])(?=\d{3}(?!\d))", "", text)


def _normal(text: str) -> str:
    text = re.sub(r"\\\$|(?<!\\)\\[()\[\]]|\\!\s*", "", text.replace("−", "-").replace("{,}", ","))
    text = re.sub(r"\\(?:left|right|displaystyle)(?![A-Za-z])", "", text)
    text = re.sub(r"(?:(?<!\\)\\[,;: ]|~|\s)+", " ", text)
    text = re.sub(r"^[ $]+|[ $.]+$", "", text)
    text = re.sub(r"\\[dt]frac", r"\\frac", text)
    text = re.sub(r"\\frac\s*(\d)", r"\\frac{\1}", text)
    text = re.sub(r"(\\frac\{[^{}]*\})\s*(\d)", r"\1{\2}", text)
    alone = _WRAPPED.fullmatch(text)  # then it is the answer and not a unit
    text = alone[1] if alone else _UNIT.sub("", text)
    text = re.sub(r"\^\s*\{?\s*\\circ\s*\}?|\\degree|\\%|%", "", text)
    text = re.sub(r"^[A-Za-z]\s*=\s*", "", text.strip())
    if not re.match(r"[(\[]|\\\{", text):  # "(1,234)" is a pair
        text = re.sub(r"(?<![\d.,])(?<!\d )\d{1,3}(?:,\d{3})+(?![\d,])", lambda m: m[0].replace(",", ""), text)
        text = re.sub(r"(?<![\d.,])(?<!\d )\d{1,3}(?: \d{3})+(?! ?\d)", lambda m: m[0].replace(" ", ""), text)
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text)  # "3 4" is not 34


def _as_number(text: str) -> Fraction | None:
    fraction = re.fullmatch(r"([-+]?)\\frac\{(-?\d+)\}\{(-?\d+)\}", text)
    try:
        if fraction:
            value = Fraction(int(fraction[2]), int(fraction[3]))
            return -value if fraction[1] == "-" else value
        # Fraction alone would read "12_8" as 128.
        return Fraction(text) if re.fullmatch(r"[-+]?(?:\d+/\d+|\d+\.?\d*|\.\d+)", text) else None
    except (ValueError, ZeroDivisionError):
        return None

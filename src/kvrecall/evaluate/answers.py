"""The answer that a text ends in: \\boxed{…}, a number, or a letter; and whether it is the expected one.

In doubt there is no answer, or it is not the expected one: a score may be too low, not too high.
"""

from __future__ import annotations

import re
from fractions import Fraction
from functools import cache

_GROUP = r"\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\}"  # braces within braces within braces
_WRAPPED = re.compile(rf"\\(?:text(?:bf|it|rm|sf)?|math(?:bf|it|rm|sf)|mbox|boldsymbol|bm)\s*({_GROUP})")
_NUMBER = re.compile(r"""(?x)
    (?:(?<![\w)}\]])[-+])?                                      # after a word or a bracket it is a dash or an operator
    (?: \\[dtc]?frac\{\d+\}\{\d+\}
      | (?:\d{1,3}(?:,\d{3})+(?!\d) | \d+)(?:\.\d+)?(?:/\d+)?    # a comma belongs to a number only between thousands
      | (?<![\w.])\.\d+ )""")
# Words that change the number they stand beside: no units.
_COUNT = (
    r"(?i:(?:dozen|score|pair|third|quarter|(?:hundred|thousand|[mbtr]+illion)(?:th)?|(?:four|fif|six|seven|eigh|nin|ten)th)s?"
    r"|hal(?:f|ves)|gross|kilo|mega|giga|milli|micro|nano|squared|cubed|times|mod(?:ulo)?|base|binary|factorial|choose|plus|minus"
    r"|sqrt|roots?|log|sin|cos|tan|exp|pi|prime|repeating|recurring)"
)
# What makes a number a part of an expression: before it and after it. "the answer - 42" and "42 km/h" are none.
_BEFORE = re.compile(r"""(?x)
    (?: [\w^_{] | [/√±]\s* | \+/?-?\s* | \d[.,:] | \d[^\S\n]+ | \w[-–+] | \w\( | (?:[(\[]|\\\{)[^()\[\]{}]*,\s*
    | [\d)}\]]\s*[-–+*/^·×]+\s* | \b[A-Za-z]\s*[-+*]\s* | \b(?i:mod|modulo|base|plus|minus|negative|times|over)\.?\s+
    | \\(?:times|cdot|div|pm|mp|sqrt|log|ln|sin|cos|tan|over|choose|[bp]?mod)\s* )\Z""")
_AFTER = re.compile(rf"""(?x)
    \s*(?: \^(?!\s*\{{?\s*\\circ) | \\(?:times|cdot|sqrt|pi|log|ln|over|choose|[bp]?mod) | [/√π!] | [*·×]\s*\w
    | [-+]\s*(?:[A-Za-z]\b|\\) ) | [inxyzk](?![A-Za-z]) | [ \t(-]*(?:in[ ])?{_COUNT}\b""")
# Of one or two letters only what is surely a unit: 5\text{x} is a product, 5\text{th} an ordinal, 5\text{ pm} not 5\text{ am}.
_SHORT = r"(?:[mgshLNJWVKCF]|[cmkn]m|[mk]g|m[lL]|ft|in|yd|mi|oz|lb|hr|Hz|Pa|eV|kJ|kN|kW|sq|of)"
_LIMIT = r"(?:and|not|more|less|than|greater|fewer|least|most|above|below|under|over)"
_WORD = rf"(?:{_SHORT}|(?!(?:{_COUNT}|{_LIMIT})\b)[A-Za-z]{{3,}})\b"
_UNIT = re.compile(
    rf"(?:(?<![_^])\\(?:text(?:bf|rm)?|mathrm|mbox)\s*\{{\s*{_WORD}(?:[\s./-]+{_WORD})*[\s.]*\}}(?:\^\s*\{{?[23]\}}?)?\s*)+$"
)
_NAME = re.compile(r"""(?x)  # "x_{1} =", "AB =", "x \in"
    ([A-Za-z] | [A-Z]{2,3} | \\(?:var)?(?:alpha|beta|gamma|delta|theta|lambda|mu|rho|phi|omega))\s*(_\{\w+\})?
    \s*(?:=|\\in(?![A-Za-z]))\s*""")
# No claim was made in a sentence that has this before or after it, and one was withdrawn by a text like this after it.
_DOUBTED = re.compile(r"""(?xi)
    \b(?:if|suppos\w+|assum\w+|imagine|whether|unless|perhaps|maybe|doubt|claim(?:s|ed)?|says?|said|neither|nor|false)\b
    | (?:\bnot|n['’]t)\b[^,]*$ | \b(?:which|what|wrong|incorrect|previous|earlier|first|initial|old|other|another)\s+$""")
_DENIED = re.compile(r"""(?xi)
    [^.!?\n]{0,400}\? | (?!\W{0,40}(?:since|because|as|for|due)\b)
    [^.!?\n]{0,400}\b(?:wrong|incorrect|false|impossible|contradict\w*|fails?|cannot|but|however|if|unless|then|not)\b""")
_WITHDRAWN = re.compile(r"""(?xi)
    \b(?:wait|hmm+|actually|oops|sorry|correction|mistaken?|reconsider|on\ second\ thought|scratch\ that)\b | \bno,
    | \b(?:it|this|that|answer)\s+(?:is|was)\s+(?:wrong|false|(?:not\s+|in)correct) | \bit\s+(?:should|must|has\ to)\s+be\b""")
_CLAIMS_CHARACTERS = 20_000
"""Of the end of an answer, in which claims are looked for: each is judged by what stands around it."""
_LONGEST = 1000
"""Characters of an answer that is compared by its meaning: no right one is as long, and what loops is longer."""
_WRAPPINGS = 8
"""Of \\text{\\text{…}} that are taken off."""
_SENTENCE = re.compile(r"[.!?;](?=\s)|\n(?=\W*[A-Z\n])|(?<!if )\b(?:so|therefore|thus|hence)\b", re.IGNORECASE)


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
    *_, last = None, *_NUMBER.finditer(text)
    if last is None:
        return None
    part = _BEFORE.search(text[max(0, last.start() - 80) : last.start()]) or _AFTER.match(text[last.end() : last.end() + 80])
    return None if part else last[0]


def final_choice(text: str, letters: str = "ABCD") -> str | None:
    """The letter that the last box begins with; without a box, that of a last line, of the last claim, or of a first line.

    A claim is "answer is X" or "option X is correct", in no sentence that doubts it and with nothing after that withdraws it.
    letters: of the choices that there are, upper case. Only in a box or in brackets may the text have it in lower case.
    """
    found = boxed(text)
    claim, line, box = _patterns(letters)
    if found is not None:
        letter = box.fullmatch(_plain(found).strip(" .*"))
        return _letter(letter) if letter else None
    text = _plain(text).strip()
    lines = text.split("\n")
    if last := line.fullmatch(lines[-1].strip()):
        return _letter(last)
    claims = [match for match in claim.finditer(text, max(0, len(text) - _CLAIMS_CHARACTERS)) if _is_made(match)]
    if len({_letter(match) for match in claims if match["right"]}) > 1:  # "Option A is correct. Option B is correct."
        return None
    chosen = claims[-1] if claims else line.match(text)
    return _letter(chosen) if chosen and not _WITHDRAWN.search(text, chosen.end()) else None


def same_answer(given: str | None, expected: str) -> bool:
    """Whether two mathematical answers are equal: as numbers if both are, otherwise letter for letter after normalisation.

    Normalisation drops spaces but for those between two numbers, dollar signs, \\left and \\right, commas and spaces between
    thousands, units in a \\text at the end, degree and percent signs and a leading "x =" (if both have one, the same), writes
    \\dfrac as \\frac, and puts braces where TeX allows to leave them out.
    Expressions that are equal only by algebra are told apart: no answer is accepted by mistake.
    """
    if given is None:
        return False
    if max(len(given), len(expected)) > _LONGEST:
        return given.strip() == expected.strip()
    (name, left), (other, right) = _normal(given), _normal(expected)
    if name and other and name != other:
        return False
    if left == right:
        return bool(left)
    number = _as_number(left)
    return number is not None and number == _as_number(right)


@cache
def _patterns(letters: str) -> tuple[re.Pattern[str], ...]:
    """Of a claim, of a line that is a letter and of a box that begins with one; the letter is the last group of a match."""
    bracketed = rf"[(\[]\s*([{letters}{letters.lower()}])\s*[)\]]"
    bare = rf"""['"“‘*_]?([{letters}])"""
    label = rf"(?:[(\[][{letters}][)\]]|[{letters}][.):])"
    # "A strong base", "C. elegans", "C-H", "A's": no choice. "A or B", "A, B and C", "A) 1 or B) 2": none that was made.
    no_word = r"""(?![\w/+=^&°–-]|['’]\w|\.[ \t]*[a-z]|[ \t]+(?!(?:because|since|as|due|based|given|which|and|but|so)\b)\w)"""
    no_list = rf"(?!\s*(?:,|/|&|\b(?:or|and)\b)\s*[(\[]?[{letters}]\b|[^\n]{{0,400}}\bor\s+{label})"
    says = r"\b(?:answer|choice|option)[*_]*\s*(?:\bis\b|\bmust\s+be\b|:|=)"
    # Options that follow on lines of their own were not chosen, unless there is only one.
    only = rf"[(\[*_]*[{letters}](?:[)\]*_.]*[ \t]*$|[)\].](?![\s\S]{{0,2000}}\n\W{{0,20}}{label}))"
    between = rf"(?:[*_:\s]*(?={only})|[*_: \t]*(?:(?:option|choice)\s+)?)"
    right = r"\s+is\s+(?:the\s+)?(?:correct|right)(?:\s+(?:answer|choice|option|one))?\s*(?:[.,!]|$)"
    claim = (
        rf"(?i:{says}{between})(?:{bracketed}|{bare}{no_word}){no_list}"
        rf"|\b(?i:option|choice|answer)(?P<right>\s+)(?:{bracketed}|{bare}[)]?)(?=(?i:{right}))"
    )
    rest = rf"(?!\s+is\b|.*(?<!\w){label})(?:\s|\\[ ,;:]|~|\\q?quad\b).*"
    box = rf"(?:{bracketed}|([{letters}])[.)]){no_list}{rest}|[(\[]?\s*([{letters}{letters.lower()}])\s*[)\]]?"
    return (
        re.compile(claim, re.MULTILINE),
        re.compile(rf"[ \t]*(?:{bracketed}[.]?|{bare}['\"”’*_]?[.)]?)[ \t]*$", re.MULTILINE),
        re.compile(box, re.DOTALL),
    )


def _letter(match: re.Match[str]) -> str:
    return match[match.lastindex or 0].upper()


def _is_made(claim: re.Match[str]) -> bool:
    """Whether the sentence around a claim makes it, rather than to suppose, ask, report or deny it."""
    before = _SENTENCE.split(claim.string[max(0, claim.start() - 500) : claim.start()])[-1]
    return not _DOUBTED.search(before) and not _DENIED.match(claim.string, claim.end())


def _plain(text: str) -> str:
    """A text without its typography: \\textbf{…}, **…**, dollar signs, \\(…\\), separators of thousands that are not commas."""
    text = re.sub(r"[^\S\n]+", lambda m: " " if len(m[0]) > 40 else m[0], text)
    text = re.sub(r"\n{4,}", "\n\n", text)
    for _ in range(_WRAPPINGS):
        bare = _WRAPPED.sub(lambda m: m[1][1:-1], text)
        if bare == text:
            break
        text = bare
    text = re.sub(r"\\?\$|\\[()\[\]]|`|(?<!\w)\*\*|\*\*(?!\w)", "", text.replace("−", "-"))
    return re.sub(r"(?<=\d)(?:\{,\}|,\\!\s*|\\[,;:!])(?=\d{3}(?!\d))", "", text)


def _normal(text: str) -> tuple[str, str]:
    """The name before a leading "=", empty if there is none, and the normalised value."""
    text = re.sub(r"\\\$|(?<!\\)\\[()\[\]]|\\!\s*", "", text.replace("−", "-").replace("{,}", ","))
    text = re.sub(r"\\(?:left|right|displaystyle)(?![A-Za-z])", "", text)
    text = re.sub(r"(?:(?<!\\)\\[,;: ]|~|\s)+", " ", text)
    text = _braced(re.sub(r"^[ $]+|[ $.]+$", "", text))
    alone = _WRAPPED.fullmatch(text)  # then it is the answer and not a unit
    text = alone[1][1:-1] if alone else _UNIT.sub("", text)
    text = re.sub(r"\^\s*\{?\s*\\circ\s*\}?|\\degree|\\%|%", "", text).strip()
    text = re.sub(r"^\(\s*([A-Z])\s*\)$", r"\1", text)
    name = _NAME.match(text)
    if name:
        text = text[name.end() :]
    if not re.match(r"[(\[]|\\\{", text):  # "(1,234)" is a pair
        text = re.sub(r"(?<![\d.,])(?<!\d )\d{1,3}(?:,\d{3})+(?![\d,])", lambda m: m[0].replace(",", ""), text)
        text = re.sub(r"(?<![\d.,])(?<!\d )\d{1,3}(?: \d{3})+(?! ?\d)", lambda m: m[0].replace(" ", ""), text)
    value = re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text)  # "3 4" is not 34
    return (name[1] + (name[2] or "") if name else ""), value


def _braced(text: str) -> str:
    """A text with the braces that TeX lets one leave out: \\frac{a}b, \\frac12, \\sqrt2 and x_1 are \\frac{a}{b} and so on."""
    text = re.sub(r"\\[dtc]frac", r"\\frac", text)
    text = re.sub(r"(\\(?:frac|sqrt)\s*(?=\d)|\\(?:frac|sqrt)\s+(?=[A-Za-z])|[_^]\s*(?=[\dA-Za-z]))(.)", r"\1{\2}", text)
    while (more := re.sub(rf"(\\frac\s*{_GROUP})\s*([\dA-Za-z])", r"\1{\2}", text)) != text:
        text = more
    return text


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

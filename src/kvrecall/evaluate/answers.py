"""The answer that a text ends in: \\boxed{…}, or the letter of a choice. `expressions` has the mathematical answers.

math-verify covers neither: it makes one set of several boxes, and takes "A boat sails" for the choice A.
"""

from __future__ import annotations

import re

_WRAPPED = re.compile(r"\\(?:text(?:bf|it|rm|sf)?|math(?:bf|it|rm|sf)|mbox|boldsymbol|bm)\s*\{([^{}]*)\}|\\?\$|\\[()\[\]]|\*\*")

_LINE_CHARACTERS = 1000
"""Of the end of an answer without a box, in which its last line is looked for."""


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


def final_choice(text: str, letters: str = "ABCD") -> str | None:
    """The letter that the last box begins with; without a box, that of a last line such as "B" or "The answer is (B).".

    In doubt there is none ("A or B", a letter in the middle of a text): a score may be too low, not too high. letters: of the
    choices that there are, upper case; only in a box or in brackets may the text have it in lower case.
    """
    either = f"[{letters}{letters.lower()}]"
    found = boxed(text)
    if found is not None:
        no_other = rf"(?!.*(?<!\w)(?:[(\[]{either}[)\]]|[{letters}][.)]))"
        pattern = rf"({either})|(?:[(\[]\s*({either})\s*[)\]]|([{letters}])[.)]){no_other}(?:[\s\\].*)?"
        match = re.fullmatch(pattern, _plain(found).strip(" ."), re.DOTALL)
    else:
        line = _plain(text[-_LINE_CHARACTERS:]).rstrip().rpartition("\n")[2].strip()
        claim = r"(?:.*\b(?i:answer)(?:\s+is|\s+must\s+be|\s*:)\s*(?:option\s+)?)?"
        match = re.fullmatch(rf"""{claim}["'“]?(?:[(\[]({either})[)\]]|([{letters}]))["'”]?[.)]?""", line)
    return next(letter for letter in match.groups() if letter).upper() if match else None


def _plain(text: str) -> str:
    """A text without its typography: \\textbf{…}, **…**, dollar signs, \\(…\\)."""
    return _WRAPPED.sub(lambda found: found[1] or "", text)

"""The answer that a text ends in: \\boxed{…}, or the letter of a choice. `expressions` has the mathematical answers.

math-verify covers neither: it makes one set of several boxes, knows no letter in a box, and takes "A boat sails" and "If the
answer is A, …" for the choice A. In doubt there is no answer: a score may be too low, not too high.
"""

from __future__ import annotations

import re
from functools import cache

_GROUP = r"\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\}"  # braces within braces within braces
_WRAPPED = re.compile(rf"\\(?:text(?:bf|it|rm|sf)?|math(?:bf|it|rm|sf)|mbox|boldsymbol|bm)\s*({_GROUP})")
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

"""Names of generated tasks -> tasks. A task's argument follows its name after a colon: `niah-multikey:16`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvrecall.core.errors import ParameterError, UnknownNameError
from kvrecall.evaluate.tasks import ruler, structured
from kvrecall.evaluate.tasks.base import Task


@dataclass(frozen=True)
class Known:
    """factory: (spec, argument) -> Task. argument: its default; meaning: of the argument, "" if there is none. least: of it."""

    factory: Callable[[str, int], Task]
    summary: str
    argument: int = 0
    meaning: str = ""
    least: int = 1
    most: int = 1024


KNOWN = {
    "niah": Known(ruler.niah, "one needle in a haystack, over depths and lengths"),
    "niah-multikey": Known(ruler.multikey, "one needle among many", 8, "needles in the text", 2, 64),
    "niah-multivalue": Known(ruler.multivalue, "all numbers of one name", 4, "numbers of the name", 2, 64),
    "niah-multiquery": Known(ruler.multiquery, "several needles in one question", 4, "needles asked for", 2, 64),
    "multi-turn": Known(ruler.multi_turn, "a needle per turn of one conversation", 8, "turns", 2, 32),
    "variable-tracking": Known(ruler.variable_tracking, "every variable of a chain of assignments", 4, "hops", 1, 32),
    "common-words": Known(ruler.common_words, "words that stand often in a list", 10, "common words", 1, 50),
    "frequent-words": Known(ruler.frequent_words, "the most frequent invented words", 3, "words asked for", 1, 20),
    "json-kv": Known(structured.json_kv, "the value of a key in a JSON object", 8, "hex digits of key and value", 2, 32),
    "copy": Known(structured.copy, "repeat a passage word for word", 100, "words to repeat", 2, 8192),
}


def generated(spec: str) -> Task:
    """The task of a spec; raises UnknownNameError or ParameterError."""
    name, colon, argument = spec.partition(":")
    if name not in KNOWN:
        raise UnknownNameError("task", name, KNOWN)
    known = KNOWN[name]
    if not colon:
        return known.factory(spec, known.argument)
    if not known.meaning:
        raise ParameterError(f"task {name}", "no argument", argument, f"Write {name} alone.")
    if not (argument.isascii() and argument.isdigit() and len(argument) < 19) or not known.least <= int(argument) <= known.most:
        expected = f"{known.meaning}, an integer in [{known.least}, {known.most}]"
        raise ParameterError(f"task {name}", expected, argument, f"For example {name}:{known.argument}.")
    return known.factory(spec, int(argument))

"""What is compared: methods under budgets, beside full attention."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvrecall import methods
from kvrecall.core.errors import ParameterError
from kvrecall.core.whole_files import parse_json
from kvrecall.methods.base import Method
from kvrecall.methods.settings import from_settings, settings_of

FULL = "full"
ALL = "all"
"""Stands for every method that has a name."""
_SUFFIXES = (".json", ".toml")
_SETTING = re.compile(r"[\w-]+\s*=")


@dataclass(frozen=True)
class Condition:
    """A method under a budget. name: as asked for. budget: tokens per KV head and step; None for full attention, for methods
    that retrieve nothing, and for methods from files that were given none: their layers may have budgets of their own."""

    name: str
    method: Method
    budget: int | None

    @property
    def label(self) -> str:
        """Unique among the conditions of a run."""
        return self.name if self.budget is None else f"{self.name}@{self.budget}"

    @property
    def covered_tokens(self) -> int:
        """The longest text that every layer attends to whole, so that the method is full attention there."""
        zones = self.method.zone_sizes()
        layers = [self.method, *(self.method.at(number) for number, _ in self.method.per_layer)]
        below = min(layer.full_attention_below() for layer in layers)
        return max(below - 1, zones.sink_tokens + zones.local_tokens + (self.budget or 0))


def listed(text: str) -> list[str]:
    """The specs of a list as people write it, separated by commas.

    A comma inside brackets or quotes belongs to a value, and so does one before `key=value` in a method's settings:
    "method:index=pages:page_tokens=8,bounds=min-max@64,quest" are two. No method's name has an equals sign; what ends as a
    method file does is one.
    """
    found: list[str] = []
    for part in (part.strip() for part in _between_commas(text)):
        if found and ":" in found[-1] and _SETTING.match(part) and not _split(part)[0].endswith(_SUFFIXES):
            found[-1] += f",{part}"
        elif part:
            found.append(part)
    return found


def _between_commas(text: str) -> list[str]:
    """The parts between commas that stand outside brackets and quotes."""
    found, depth, quoted = [""], 0, False
    for letter in text:
        quoted ^= letter == '"'
        depth = max(0, depth + (0 if quoted else {"[": 1, "{": 1, "]": -1, "}": -1}.get(letter, 0)))
        if letter == "," and not quoted and not depth:
            found.append("")
        else:
            found[-1] += letter
    return found


def conditions(specs: list[str], budgets: list[int], layers: int | None = None) -> list[Condition]:
    """Full attention first, then every method under every budget.

    specs: names (`all` stands for every one), `name:key=value;key=value`, either with a budget of its own as `spec@512`, or
    method files (.json, .toml; for a model with `layers` layers). budgets: tokens, for specs without one; if there are none,
    the method's own; method files have theirs, and what retrieves nothing has none. full_attention_threshold is 0 unless the
    spec says otherwise. Raises the errors of methods and files.
    """
    found = [Condition(FULL, methods.get(FULL), None)]
    for asked, given in ((listed, one) for listed in specs for one in _each(listed)):
        spec, own = _split(given)
        method = _method(spec, layers)
        if own and not method.top_k and given == asked:
            why = "It attends to everything." if method.top_k is None else "It retrieves nothing."
            raise ParameterError("--methods", f"no @ behind {spec}", given, f"{why} Remove it.")
        if method.top_k is None:
            continue  # full attention is there already
        if own and any("top_k" in dict(values) for _, values in method.per_layer):
            raise ParameterError("--methods", "no @ behind a method whose layers have budgets", given, "Remove it.")
        if (own or budgets) and method.top_k and _sets_top_k(spec):
            why = "Give the budget once: as top_k, as @, or as --budgets."
            raise ParameterError("--methods", "top_k or a budget beside it, not both", given, why)
        if (own is None and (method.per_layer or spec.endswith(_SUFFIXES))) or not method.top_k:
            found.append(Condition(spec, method, None))
            continue
        for budget in [own] if own else budgets or [method.top_k]:
            found.append(Condition(spec, _with_budget(spec, method, budget), budget))
    labels = [condition.label for condition in found]
    for label in labels:
        if labels.count(label) > 1:
            raise ParameterError("--methods", "each method and budget once", label, "Remove the repetition.")
    return found


def described(found: list[Condition]) -> dict[str, Any]:
    """Label -> class and settings of the method, for a run's configuration."""
    return {c.label: {"method": type(c.method).__name__, **settings_of(c.method)} for c in found}


def _each(given: str) -> list[str]:
    """What a spec stands for: "all@512" is every registered name with that budget; all others are themselves."""
    end = given[len(ALL) :]
    return [name + end for name in methods.names()] if given.startswith(ALL) and end[:1] in ("", ":", "@") else [given]


def _split(given: str) -> tuple[str, int | None]:
    """A spec and its own budget: "pariskv@100" -> ("pariskv", 100)."""
    spec, at, budget = given.rpartition("@")
    if not at or given.endswith(_SUFFIXES):
        return given, None
    if not (budget.isascii() and budget.isdigit() and len(budget) < 19 and int(budget)):
        raise ParameterError("--methods", "a number of tokens behind @", given, "For example pariskv@512.")
    return spec, int(budget)


def _method(spec: str, layers: int | None) -> Method:
    if spec.endswith(_SUFFIXES):
        from kvrecall.methods.files import load_method  # needs pydantic, which takes a while to import

        return load_method(Path(spec), layers)
    name, _, text = spec.partition(":")
    settings: dict[str, Any] = {}
    for setting in filter(None, text.split(";")):
        key, equals, value = setting.partition("=")
        if not equals:
            raise ParameterError("--methods", "name:key=value;key=value", spec, "For example pariskv:stage1=product.")
        settings[key.strip().replace("-", "_")] = _value(value)
    return from_settings(name, {"full_attention_threshold": 0} | settings)


def _sets_top_k(spec: str) -> bool:
    """Whether the settings behind a name have a budget of their own; files have theirs, and --budgets leaves it alone."""
    settings = [] if spec.endswith(_SUFFIXES) else spec.partition(":")[2].split(";")
    return any(setting.partition("=")[0].strip().replace("-", "_") == "top_k" for setting in settings)


def _with_budget(spec: str, method: Method, budget: int) -> Method:
    try:
        return replace(method, top_k=budget)
    except ParameterError as error:  # which of many methods was it?
        raise ParameterError(f"{spec}@{budget}: {error.name}", error.expected, error.got, error.remedy) from None


def _value(text: str) -> Any:
    try:
        return parse_json(text)
    except ValueError:
        return text  # a bare word is a string

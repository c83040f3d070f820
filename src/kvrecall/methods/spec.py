"""Methods as text, for options, settings and lists.

    NAME                     louiskv
    NAME:KEY=VALUE;KEY=VALUE pariskv-balanced:estimate=page-means;update_interval=64
    FILE                     tuned.json or tuned.toml, such as `kvrecall tune` writes
    …@BUDGET                 louiskv:threshold=0.85@512; BUDGET is the method's top_k
    recommended              stands for RECOMMENDED; may have settings and a budget

Values are JSON; a bare word is a string. A comma belongs to a value (`estimate=page-means:page_tokens=32`) or separates the
methods of a list (`listed`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvrecall.core.errors import ParameterError
from kvrecall.core.texts import split_at_commas, whole
from kvrecall.core.whole_files import parse_json
from kvrecall.methods.base import Method
from kvrecall.methods.registry import get, name_of
from kvrecall.methods.settings import current, from_settings, settings_of

RECOMMENDED_NAME = "recommended"
RECOMMENDED_SETTINGS: dict[str, Any] = {"estimate": "page-means", "update_interval": 64}
RECOMMENDED = "pariskv-balanced:" + ";".join(f"{key}={value}" for key, value in RECOMMENDED_SETTINGS.items())
"""The recommended method for long contexts, by measurements (docs/results): the default if no method is given.

It is a text and not a class, so that results record its settings, also if the recommendation changes later.
"""

FORM = "NAME, NAME:KEY=VALUE;KEY=VALUE or a method file, and @TOKENS behind it for a budget"
_EXAMPLE = "For example pariskv-balanced:estimate=page-means@100; `kvrecall info` lists the names."
_SUFFIXES = (".json", ".toml")
_SETTING = re.compile(r"[\w-]+\s*=")


@dataclass(frozen=True)
class Spec:
    """A parsed text. text: without the budget, `recommended` spelled out, former names of settings replaced. name: of the
    method, or the file.

    settings: from the text. budget: tokens per KV head and step, None if not given.
    """

    text: str
    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    budget: int | None = None

    def __str__(self) -> str:
        """The whole text: it says what ran, wherever it is recorded, and `parse` reads it."""
        return self.text if self.budget is None else f"{self.text}@{self.budget}"

    @property
    def is_file(self) -> bool:
        """Whether it names a method file."""
        return self.name.endswith(_SUFFIXES)

    def method(self, layers: int | None = None, **more: Any) -> Method:
        """The method. layers: of the model, if known; files are checked against it. more: settings as plain values, which
        override those of the text and the file.

        Raises UnknownNameError, ParameterError for an unsupported budget, InputFileError for a bad file or a value of another
        type, and the method's own errors.
        """
        method = self.without_budget(layers, **more)
        if self.budget is None:
            return method
        if "top_k" in more:
            raise ParameterError("method", "top_k or a budget behind @, not both", str(self), "Remove one.")
        check_budget(method, str(self))
        return with_budget(method, self.text, self.budget)

    def without_budget(self, layers: int | None = None, **more: Any) -> Method:
        """As `method`, with the method's own budget."""
        if not self.is_file:
            return from_settings(self.name, self.settings | current(more))
        from kvrecall.methods.files import load_method  # pydantic is slow to import

        method = load_method(Path(self.name), layers)
        return from_settings(name_of(method), settings_of(method) | current(more)) if more else method


def parse(text: str) -> Spec:
    """Parses a text in the form above. Raises ParameterError for other forms."""
    if not isinstance(text, str):
        raise ParameterError("method", FORM, text, _EXAMPLE)
    spec, at, count = text.strip().rpartition("@")
    budget = None
    if not at:
        spec = count
    elif text.endswith(_SUFFIXES):
        spec = text.strip()  # a folder with an @ in its name
    else:
        budget = whole(count)
        if budget < 1:
            raise ParameterError("method", FORM, text, "Behind @ stands a whole number of tokens from 1 on, as in pariskv@512.")
    if spec.endswith(_SUFFIXES):
        return Spec(spec, spec, budget=budget)
    name, _, settings = spec.partition(":")
    name, pairs = name.strip(), {}
    for part in filter(str.strip, settings.split(";")):
        key, value = setting(part, "method", FORM, _EXAMPLE)
        if key in pairs:
            raise ParameterError("method", "every setting once", text, f"Remove one of the two {key}.")
        pairs[key] = part.partition("=")[2].strip(), value
    written, pairs = pairs.keys(), current(pairs)
    if short := name.lower() == RECOMMENDED_NAME:
        name = "pariskv-balanced"
        pairs = {key: (str(value), value) for key, value in RECOMMENDED_SETTINGS.items()} | pairs
    if short or pairs.keys() != written:
        spec = f"{name}:" + ";".join(f"{key}={value}" for key, (value, _) in pairs.items())
    if budget and "top_k" in pairs:
        raise ParameterError("method", "top_k or a budget behind @, not both", text, "Remove one.")
    return Spec(spec, name, {key: value for key, (_, value) in pairs.items()}, budget)


def recommended(**params: Any) -> Method:
    """The recommended method for long contexts: `ParisKVBalanced(estimate="page-means", update_interval=64)`.

    params: other values of its parameters, such as top_k (100 by default). Balanced keys need statistics of the model's keys,
    which are computed when a model is first used (docs/design/statistics.md).
    """
    return get("pariskv-balanced", **RECOMMENDED_SETTINGS | params)


def setting(text: str, option: str, form: str = "key=value", remedy: str = "For example top_k=200.") -> tuple[str, Any]:
    """A setting `key=value` as (key, value); dashes of the key are underscores. Raises ParameterError naming the option."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ParameterError(option, form, text, remedy)
    try:
        parsed = parse_json(value)
    except ValueError:
        parsed = value.strip()  # a bare word is a string: gqa=max
    return key.strip().replace("-", "_"), parsed


def listed(text: str) -> list[str]:
    """Splits a list of methods at its commas.

    A comma inside brackets or quotes belongs to a value. So does a comma before `key=value` in a method's settings:
    "method:index=pages:page_tokens=8,bounds=min-max@64,quest" are two methods. A text with the ending of a method file is a
    file.
    """
    methods: list[str] = []
    for part in (part.strip() for part in split_at_commas(text)):
        before_budget = part if part.endswith(_SUFFIXES) else part.rpartition("@")[0] or part
        if methods and ":" in methods[-1] and _SETTING.match(part) and not before_budget.endswith(_SUFFIXES):
            methods[-1] += f",{part}"
        elif part:
            methods.append(part)
    return methods


def check_budget(method: Method, text: str) -> None:
    """Raises ParameterError for a method for which a budget after @ has no meaning."""
    if not method.top_k:
        why = "It attends to everything." if method.top_k is None else "It retrieves nothing."
        raise ParameterError("method", f"no @ behind {text.rpartition('@')[0]}", text, f"{why} Remove it.")
    if any("top_k" in dict(values) for _, values in method.per_layer):
        raise ParameterError("method", "no @ behind a method whose layers have budgets", text, "Remove it.")


def with_budget(method: Method, text: str, budget: int) -> Method:
    """The method with another top_k. Errors name the text, because a list has several methods."""
    try:
        return replace(method, top_k=budget)
    except ParameterError as error:
        raise ParameterError(f"{text}@{budget}: {error.name}", error.expected, error.got, error.remedy) from None

"""Names of methods and their classes, imported on first use."""

from __future__ import annotations

from dataclasses import MISSING, fields
from importlib import import_module
from typing import Any

from kvrecall.core.errors import ParameterError, UnknownNameError
from kvrecall.methods.base import Method

_METHODS = {
    "pariskv": ("kvrecall.methods.pariskv", "ParisKV"),
    "pariskv-balanced": ("kvrecall.methods.pariskv", "ParisKVBalanced"),
    "prkv": ("kvrecall.methods.prkv", "PRKV"),
    "ctkvr": ("kvrecall.methods.ctkvr", "CTKVR"),
    "louiskv": ("kvrecall.methods.louiskv", "LouisKV"),
    "method": ("kvrecall.methods.base", "Method"),
    "exact": ("kvrecall.methods.full", "Exact"),
    "full": ("kvrecall.methods.full", "Full"),
    "arkvale": ("kvrecall.baselines.arkvale", "ArkVale"),
    "freekv": ("kvrecall.baselines.freekv", "FreeKV"),
    "h2o": ("kvrecall.baselines.h2o", "H2O"),
    "magicpig": ("kvrecall.baselines.magicpig", "MagicPIG"),
    "pqcache": ("kvrecall.baselines.pqcache", "PQCache"),
    "quest": ("kvrecall.baselines.quest", "Quest"),
    "raas": ("kvrecall.baselines.raas", "RaaS"),
    "retroinfer": ("kvrecall.baselines.retroinfer", "RetroInfer"),
    "shadowkv": ("kvrecall.baselines.shadowkv", "ShadowKV"),
    "snapkv": ("kvrecall.baselines.snapkv", "SnapKV"),
    "snapkv+": ("kvrecall.baselines.snapkv", "SnapKVPlus"),
    "socket": ("kvrecall.baselines.socket", "SOCKET"),
    "streaming": ("kvrecall.baselines.streaming", "Streaming"),
    "twilight": ("kvrecall.baselines.twilight", "Twilight"),
}


def register(name: str, module: str, attribute: str) -> None:
    """Registers a method: the class `attribute` of `module`, imported on first use.

    name: lower case. Raises ParameterError if another class has the name.
    """
    if name != name.lower() or _METHODS.get(name, (module, attribute)) != (module, attribute):
        expected = "a name in lower case that no other method has"
        raise ParameterError("name", expected, name, f"`kvrecall info` lists {', '.join(names())}.")
    _METHODS[name] = module, attribute


def class_names() -> dict[str, str]:
    """Class name -> registered name of every method."""
    return {attribute: name for name, (_, attribute) in _METHODS.items()}


def names() -> list[str]:
    """Registered method names, sorted; without `method`, the free composition, which has no defaults."""
    return sorted(set(_METHODS) - {"method"})


def method_class(name: str) -> type[Method]:
    """The class of a method; the name is not case-sensitive. Raises UnknownNameError."""
    key = str(name).lower()
    if key not in _METHODS:
        raise UnknownNameError("method", name, names())
    module, attribute = _METHODS[key]
    return getattr(import_module(module), attribute)


def name_of(method: Method) -> str:
    """The registered name of a method's class; raises UnknownNameError for a class that is not registered."""
    for name, (module, attribute) in _METHODS.items():
        if (type(method).__module__, type(method).__name__) == (module, attribute):
            return name
    raise UnknownNameError("method class", type(method).__name__, [attribute for _, attribute in _METHODS.values()])


def get(name: str, **params: Any) -> Method:
    """A method by name with some of its parameters set; raises UnknownNameError for an unknown method or parameter."""
    chosen = method_class(name)
    allowed = [f.name for f in fields(chosen)]
    for param in params:
        if param not in allowed:
            raise UnknownNameError(f"parameter of {name}", param, allowed)
    return chosen(**params)


def describe(name: str) -> dict[str, Any]:
    """name, one-line summary, paper and parameters with defaults, for tables and help texts."""
    chosen = method_class(name)
    defaults = {f.name: None if f.default is MISSING else f.default for f in fields(chosen)}
    summary = (chosen.__doc__ or "").strip().splitlines()[0]
    return {"name": chosen.name, "summary": summary, "paper": chosen.paper, "parameters": defaults}

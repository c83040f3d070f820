"""The parts of a method: small frozen records, by role and name.

    kvrecall.Method(index="sphere", trigger="semantic-boundary:threshold=0.9", fetch="direct:reuse=true")

A part may be written as text, `name` or `name:key=value,key=value` (values as JSON), or given as an object.
"""

from __future__ import annotations

import json
from dataclasses import astuple, fields, is_dataclass
from importlib import import_module
from typing import Any, ClassVar

from kvrecall.core.errors import ParameterError, UnknownNameError
from kvrecall.core.texts import split_at_commas
from kvrecall.core.typed_fields import TypedFields

_PARTS: dict[str, dict[str, tuple[str, str]]] = {
    "index": {
        "sphere": ("kvrecall.index.sphere", "SphereConfig"),
        "pages": ("kvrecall.index.units.pages", "PageConfig"),
        "query-centroids": ("kvrecall.index.query_centroids", "CentroidConfig"),
        "clusters": ("kvrecall.index.units.clusters", "ClusterConfig"),
        "exact": ("kvrecall.index.exact", "ExactConfig"),
        "product": ("kvrecall.baselines.pqcache", "ProductConfig"),
        "soft-hash": ("kvrecall.baselines.socket", "SoftHashConfig"),
        "accumulated": ("kvrecall.baselines.h2o", "AccumulatedConfig"),
        "milestones": ("kvrecall.baselines.raas", "MilestoneConfig"),
        "estimating-clusters": ("kvrecall.baselines.retroinfer", "EstimatingConfig"),
        "hash-sampling": ("kvrecall.baselines.magicpig", "SamplingConfig"),
        "nothing": ("kvrecall.index.exact", "NothingConfig"),
    },
    "trigger": {
        "every-step": ("kvrecall.trigger", "EveryStep"),
        "fixed-stride": ("kvrecall.trigger", "FixedStride"),
        "semantic-boundary": ("kvrecall.trigger", "SemanticBoundary"),
        "speculative": ("kvrecall.trigger", "Speculative"),
    },
    "static": {
        "observation-window": ("kvrecall.static.choice", "ObservationWindow"),
        "outlier-pages": ("kvrecall.baselines.shadowkv", "OutlierPages"),
    },
    "prune": {"top-p": ("kvrecall.baselines.twilight", "TopP")},
    "estimate": {"page-means": ("kvrecall.index.page_means", "PageMeans")},
    "fetch": {"direct": ("kvrecall.fetch", "Direct"), "staged": ("kvrecall.fetch", "Staged")},
}

ROLES = tuple(_PARTS)


class Part(TypedFields):
    """Base of all part records: a frozen dataclass whose fields are its hyper-parameters."""

    role: ClassVar[str]
    name: ClassVar[str]

    def __str__(self) -> str:
        """The part as text: its name and the fields that differ from their defaults."""
        changed = [f for f in fields(self) if getattr(self, f.name) != f.default]  # type: ignore[arg-type]
        given = ",".join(f"{f.name}={_text(getattr(self, f.name))}" for f in changed)
        return f"{self.name}:{given}" if given else self.name


def names(role: str) -> list[str]:
    """Names of the parts of a role."""
    return list(_PARTS[role])


def get(role: str, given: Any) -> Any:
    """The part for `given`: a part of this role, its text, or None.

    Raises UnknownNameError for unknown names and parameters, ParameterError for an object of another role.
    """
    if given is None or (isinstance(given, Part) and given.role == role):
        return given
    if not isinstance(given, str):
        expected = f"one of {', '.join(names(role))}, as text or as an object"
        raise ParameterError(role, expected, given, f"For example {role}={names(role)[0]!r}.")
    name, _, settings = given.partition(":")
    if name not in _PARTS[role]:
        raise UnknownNameError(role, name, names(role))
    chosen = part_class(role, name)
    known = [f.name for f in fields(chosen)]
    params = {}
    for setting in filter(None, split_at_commas(settings)):
        key, equals, value = setting.partition("=")
        if not equals:
            raise ParameterError(role, f"{name}:key=value,…", given, f"Its parameters are {', '.join(known)}.")
        if key not in known:
            raise UnknownNameError(f"parameter of {name}", key, known)
        params[key] = _value(value)
    return chosen(**params)


def part_class(role: str, name: str) -> type[Any]:
    """The record class of a part, imported on first use."""
    module, attribute = _PARTS[role][name]
    return getattr(import_module(module), attribute)


def __getattr__(attribute: str) -> Any:
    """`kvrecall.parts.SemanticBoundary` and so on, imported on first use."""
    for role, known in _PARTS.items():
        for name, (_, class_name) in known.items():
            if class_name == attribute:
                return part_class(role, name)
    raise AttributeError(f"module 'kvrecall.parts' has no attribute {attribute!r}")


def _value(text: str) -> Any:
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return tuple(map(_frozen, parsed)) if isinstance(parsed, list) else parsed


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=_plain)


def _plain(value: Any) -> Any:
    """JSON fallback: records inside a field, such as the steps of a schedule, as lists of their fields."""
    return list(astuple(value)) if is_dataclass(value) and not isinstance(value, type) else str(value)

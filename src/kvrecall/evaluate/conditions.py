"""Conditions of a run: methods under budgets, and full attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvrecall import methods
from kvrecall.core.errors import ParameterError
from kvrecall.methods.base import Method
from kvrecall.methods.settings import settings_of
from kvrecall.methods.spec import check_budget, parse, with_budget

FULL = "full"
ALL = "all"
"""Stands for every method that has a name."""
_DEFAULTS = {"full_attention_threshold": 0}
"""Settings for comparisons: methods retrieve at any length."""


@dataclass(frozen=True)
class Condition:
    """A method under a budget. name: as asked for. budget: tokens per KV head and step; None for full attention, for methods
    that retrieve nothing, and for method files without a given budget, because their layers may have their own."""

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


def conditions(specs: list[str], budgets: list[int], layers: int | None = None) -> list[Condition]:
    """Full attention first, then every method under every budget.

    specs: methods as `methods.spec` reads them (`all` stands for every name); files are for a model with `layers` layers.
    budgets: tokens, for specs without one; without any, the method's own. Method files keep theirs; methods that retrieve
    nothing have none. full_attention_threshold is 0 unless the spec sets it. Raises the errors of methods and files.
    """
    found = [Condition(FULL, methods.get(FULL), None)]
    for asked, given in ((listed, one) for listed in specs for one in _each(listed)):
        spec = parse(given)
        method = spec.without_budget(layers, **({} if spec.is_file else _DEFAULTS | spec.settings))
        if spec.budget and (method.top_k or given == asked):
            check_budget(method, given)
        if method.top_k is None:
            continue  # full attention is there already
        if budgets and method.top_k and "top_k" in spec.settings:
            why = "Give the budget once: as top_k, as @, or as --budgets."
            raise ParameterError("--methods", "top_k or a budget, not both", given, why)
        if (spec.budget is None and (method.per_layer or spec.is_file)) or not method.top_k:
            found.append(Condition(spec.text, method, None))
            continue
        for budget in [spec.budget] if spec.budget else budgets or [method.top_k]:
            found.append(Condition(spec.text, with_budget(method, spec.text, budget), budget))
    labels = [condition.label for condition in found]
    for label in labels:
        if labels.count(label) > 1:
            raise ParameterError("--methods", "each method and budget once", label, "Remove the repetition.")
    return found


def described(found: list[Condition]) -> dict[str, Any]:
    """Label -> class and settings of the method, for a run's configuration."""
    return {c.label: {"method": type(c.method).__name__, **settings_of(c.method)} for c in found}


def _each(given: str) -> list[str]:
    """Expands a spec: "all@512" to every registered name with that budget; other specs stay the same."""
    end = given[len(ALL) :]
    return [name + end for name in methods.names()] if given.startswith(ALL) and end[:1] in ("", ":", "@") else [given]

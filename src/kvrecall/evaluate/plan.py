"""The plan of an evaluation: its conditions (methods under budgets, and full attention) and its samples."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import zip_longest
from typing import Any

from kvrecall import methods
from kvrecall.core.errors import ParameterError, UnknownNameError
from kvrecall.evaluate.problems import DRIFT, FORMATS, is_drift, require_scorer, task_text
from kvrecall.evaluate.runs import Key, Record, Shard, key_of
from kvrecall.evaluate.tasks import KNOWN, generated
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
    """A method under a budget. name: with its settings. budget: tokens per KV head and step; None for full attention, for
    methods that retrieve nothing, and for method files without a given budget, because their layers may have their own."""

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
        return max(self.method.full_everywhere_below() - 1, zones.sink_tokens + zones.local_tokens + (self.budget or 0))


def conditions(specs: list[str], budgets: list[int], layers: int | None = None) -> list[Condition]:
    """Full attention first, then every method under every budget.

    specs: methods as `methods.spec` reads them (`all` stands for every name); files are for a model with `layers` layers.
    budgets: tokens, for specs without one; without any, the method's own. Method files keep theirs; methods that retrieve
    nothing have none. full_attention_threshold is 0 unless the spec sets it. Raises the errors of methods and files.
    """
    result = [Condition(FULL, methods.get(FULL), None)]
    for text, alone in ((text, text == name) for name in specs for text in _expand(name)):
        spec = parse(text)
        method = spec.without_budget(layers, **({} if spec.is_file else _DEFAULTS | spec.settings))
        if spec.budget and (method.top_k or alone):
            check_budget(method, text)
        if method.top_k is None:
            continue  # full attention is there already
        if budgets and method.top_k and "top_k" in spec.settings:
            why = "Give the budget once: as top_k, as @, or as --budgets."
            raise ParameterError("--methods", "top_k or a budget, not both", text, why)
        if (spec.budget is None and (method.per_layer or spec.is_file)) or not method.top_k:
            result.append(Condition(spec.text, method, None))
            continue
        for budget in [spec.budget] if spec.budget else budgets or [method.top_k]:
            result.append(Condition(spec.text, with_budget(method, spec.text, budget), budget))
    labels = [condition.label for condition in result]
    for label in labels:
        if labels.count(label) > 1:
            raise ParameterError("--methods", "each method and budget once", label, "Remove the repetition.")
    return result


def described(conditions: list[Condition]) -> dict[str, Any]:
    """Label -> class and settings of the method, for a run's configuration."""
    return {c.label: {"method": type(c.method).__name__, **settings_of(c.method)} for c in conditions}


def _expand(spec: str) -> list[str]:
    """Expands a spec: "all@512" to every registered name with that budget; other specs stay the same."""
    end = spec[len(ALL) :]
    return [name + end for name in methods.names()] if spec.startswith(ALL) and end[:1] in ("", ":", "@") else [spec]


@dataclass(frozen=True)
class Plan:
    """What to run. contexts: tokens of prompt and answers together for generated tasks, of the prompt alone for drift.

    samples: per task and context, and per depth for tasks with depths. depths: shares in [0, 1].
    attempts, temperature, top_p, max_new_tokens: for sets of problems. steps, window: of drift.
    """

    tasks: tuple[str, ...]
    contexts: tuple[int, ...] = (4096,)
    samples: int = 5
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    seed: int = 0
    attempts: int = 1
    temperature: float = 0.6
    top_p: float = 0.95
    max_new_tokens: int = 4096
    steps: int = 1024
    window: int = 256

    def __post_init__(self) -> None:
        for name in ("samples", "attempts", "max_new_tokens", "steps", "window"):
            if getattr(self, name) < 1:
                raise ParameterError(name, "an integer >= 1", getattr(self, name), "It is a count.")
        if not 0 <= self.temperature < float("inf"):  # refuses NaN, too
            raise ParameterError("temperature", "a finite number >= 0", self.temperature, "0 decodes greedily.")
        if not 0 < self.top_p <= 1:
            raise ParameterError("top_p", "a number in (0, 1]", self.top_p, "1 samples from all tokens.")
        for depth in self.depths:
            if not 0 <= depth <= 1:
                raise ParameterError("depths", "shares in [0, 1]", depth, "0 is the start of the text, 1 its end.")
        for spec in self.tasks:
            name = spec.partition(":")[0]
            if name not in (*KNOWN, *FORMATS, DRIFT):
                raise UnknownNameError("task", name, [*KNOWN, *FORMATS, DRIFT])
            if name in KNOWN:
                generated(spec)
            require_scorer(spec)
        for name in ("tasks", "contexts", "depths"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise ParameterError(name, "one or more, each once", list(values), "Remove the repetition, or name one.")

    def to_dict(self) -> dict[str, Any]:
        """The fields, and the SHA-256 of each file of problems or text, as a run's configuration keeps them."""
        specs = [spec for spec in self.tasks if spec.partition(":")[2] and spec.partition(":")[0] not in KNOWN]
        # A run is not resumed with another file of the same name.
        files = {spec: hashlib.sha256(task_text(spec).encode()).hexdigest() for spec in specs}
        return asdict(self) | ({"files": files} if files else {})


def configuration(
    plan: Plan, model: str, dtype: str, device: str, conditions: list[Condition], chunk_tokens: int, batch_tokens: int,
    captured: bool = False, host_rows: str = "plain",
) -> dict[str, Any]:  # fmt: skip
    """Everything that decides the answers of a run, as its folder keeps it. Captured steps round in another order. host_rows:
    as in `RetrievalCache`."""
    from kvrecall import __version__

    settings = {"kvrecall": __version__, "model": model, "dtype": dtype.removeprefix("torch."), "device": device}
    settings |= {"chunk_tokens": chunk_tokens, "batch_tokens": batch_tokens, "conditions": described(conditions)}
    settings |= {} if host_rows == "plain" else {"host_rows": host_rows}
    return settings | ({"captured": True} if captured else {}) | plan.to_dict()


@dataclass(frozen=True)
class Sample:
    """One sample, for all conditions. Context and depth are None where a task has none."""

    task: str
    context: int | None
    number: int
    attempt: int
    depth: float | None = None

    def record(self, condition: Condition) -> Record:
        """The fields that identify a sample in its record."""
        fields = {"task": self.task, "context": self.context, "sample": self.number, "attempt": self.attempt}
        fields |= {} if self.depth is None else {"depth": self.depth}
        return fields | {"condition": condition.label, "method": condition.name, "budget": condition.budget}

    def key(self, condition: Condition) -> Key:
        """Identifies the sample under a condition."""
        return key_of(self.record(condition))


@dataclass(frozen=True)
class Batch:
    """Samples that are answered together, one after another or as a batch, and their conditions."""

    samples: tuple[Sample, ...]
    conditions: tuple[Condition, ...]

    @property
    def keys(self) -> list[Key]:
        """The keys of all samples under all conditions."""
        return [sample.key(condition) for condition in self.conditions for sample in self.samples]


def batches(samples: Iterator[Sample], conditions: list[Condition], batch_tokens: int) -> Iterator[Batch]:
    """The samples as independent batches: any process may answer any of them.

    batch_tokens: samples of one task and context form a batch while their contexts add up to at most this many tokens.
    Conversations, problems and drift are not batched. For `drift:FILE`, each condition is a piece of its own.
    """
    batch: list[Sample] = []
    for sample in samples:
        if is_drift(sample.task) and ":" in sample.task:
            yield from (Batch((sample,), (condition,)) for condition in conditions)
            continue
        alone = sample.task.partition(":")[0] not in KNOWN or generated(sample.task).turns > 1
        if batch and (alone or (sample.task, sample.context) != (batch[0].task, batch[0].context)):
            yield Batch(tuple(batch), tuple(conditions))
            batch = []
        batch.append(sample)
        if alone or (len(batch) + 1) * (sample.context or 0) > batch_tokens:
            yield Batch(tuple(batch), tuple(conditions))
            batch = []
    if batch:
        yield Batch(tuple(batch), tuple(conditions))


def share(batches: Iterable[Batch], shard: Shard) -> list[Batch]:
    """The batches of one process, in its order.

    Where several processes share a run, the tasks take turns: a run that is cut short has some samples of each. Every round
    begins with the next task, because tasks take unequally long and no process should have the same one all the time.
    """
    order = list(batches)
    if shard.count > 1:
        by_task: dict[str, list[Batch]] = {}
        for batch in order:
            by_task.setdefault(batch.samples[0].task, []).append(batch)
        order = []
        for number, row in enumerate(zip_longest(*by_task.values())):
            start = number % len(row)
            order += filter(None, (*row[start:], *row[:start]))
    return [batch for place, batch in enumerate(order) if shard.has(place)]

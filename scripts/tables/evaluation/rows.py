"""What notebook/results.md is made of: a line per answer and per window of a long generation, from packed samples, kept as CSV.

Methods have their names of scripts/results.toml here, so the rows stay readable when a method's settings become another's.
"""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from scripts.results import runs_of, specs_of
from scripts.tables.common import ROOT

from kvrecall.evaluate.plan import FULL

FOLDER = ROOT / "benchmarks" / "results"
FULL_NAME = "Full attention"
_GROWS = ("conditions", "tasks", "contexts", "samples", "batch_tokens")
"""What a run may have more of later, without its samples becoming others; how many are answered together is one of them."""

Plan = dict[str, Any]
Found = tuple[str, str, dict[str, Any], list[dict[str, Any]]]
"""Run, its stage, its configuration, its records."""


@dataclass(frozen=True)
class Answer:
    """One sample under one method. depth: of a needle. budget: None where nothing is retrieved.

    attended_tokens, estimated_units: per KV head and step; older rows lack the latter, groups of tokens whose attention was
    estimated.
    """

    model: str
    run: str
    context: int
    task: str
    sample: int
    depth: float | None
    method: str
    budget: int | None
    score: float
    attended_tokens: float | None
    estimated_units: float | None = None


@dataclass(frozen=True)
class Window:
    """Means over consecutive tokens of a long generation, as `kvrecall.evaluate.drift` measures them."""

    model: str
    run: str
    context: int
    method: str
    budget: int | None
    first_step: int
    steps: int
    agreement: float
    kl: float
    recall: float | None


class Rows:
    """All rows, in the order of the plan. runs: (model, run) -> configuration."""

    def __init__(self, plan: Plan, folder: Path = FOLDER) -> None:
        """Reads what a folder holds; files that are not there hold nothing."""
        self.plan, self.folder = plan, folder
        settings = folder / "evaluation_runs.json"
        held = json.loads(settings.read_text(encoding="utf-8")) if settings.exists() else []
        self.runs = {(config["model"], run): config for run, config in ((each.pop("run"), each) for each in held)}
        self.answers: list[Answer] = _read(folder / "evaluation_answers.csv", Answer)
        self.windows: list[Window] = _read(folder / "evaluation_windows.csv", Window)

    def write(self) -> None:
        """Stores all rows."""
        listed = [{"run": run} | config for (_, run), config in sorted(self.runs.items())]
        text = json.dumps(listed, indent=1, ensure_ascii=False) + "\n"
        (self.folder / "evaluation_runs.json").write_text(text, encoding="utf-8")
        _write(self.folder / "evaluation_answers.csv", Answer, self.answers)
        _write(self.folder / "evaluation_windows.csv", Window, self.windows)

    def add(self, packed: Path) -> list[str]:
        """Takes the samples of a file of `results.py pack`; returns a line per run: what became of it.

        A run that is held already grows if the configurations agree, and is replaced otherwise.
        """
        told = []
        for run, config, records in _packed(packed):
            stage = next((s for s in self.plan["stages"] if run in {name for name, _ in runs_of(self.plan, s)}), None)
            if stage is None or stage.get("lane") == "trial" or not records:
                told.append(f"{run}: left out ({'no samples' if stage and not records else 'no stage of the results'})")
                continue
            names = {FULL: FULL_NAME} | specs_of(self.plan, stage, config["model"])
            key = (config["model"], run)
            said = self._replaced(key, config)
            if unknown := sorted({r["condition"] for r in records} - names.keys()):
                said += f"; without a name there: {unknown}"
            named = [r for r in records if r["condition"] in names]
            found = {_key(a): a for a in (_answer(key, r, names) for r in named if "windows" not in r)}
            drifted = {_key(w): w for r in named if "windows" in r for w in _windows(key, r, names)}
            same = {_condition(a) for a in found.values() if a.method != FULL_NAME} if stage.get("replaces") else set()
            kept = [a for a in self.answers if _key(a) not in found and (a.run == run or _condition(a) not in same)]
            self.answers = kept + list(found.values())
            self.windows = [w for w in self.windows if _key(w) not in drifted] + list(drifted.values())
            told.append(f"{config['model']} {run}: {len(records)} samples{said}")
        self.answers.sort(key=self._place)
        self.windows.sort(key=self._place)
        return told

    def drop(self, run: str) -> int:
        """Forgets a run, of all models; returns the number of its rows."""
        before = len(self.answers) + len(self.windows)
        self.runs = {key: config for key, config in self.runs.items() if key[1] != run}
        self.answers = [a for a in self.answers if a.run != run]
        self.windows = [w for w in self.windows if w.run != run]
        return before - len(self.answers) - len(self.windows)

    def _replaced(self, key: tuple[str, str], config: dict[str, Any]) -> str:
        held = self.runs.get(key)
        said = ""
        if held is not None:
            agree = all(held.get(n) == config.get(n) for n in held.keys() | config.keys() if n not in _GROWS)
            agree &= all(held["conditions"].get(n, c) == c for n, c in config["conditions"].items())
            if agree:
                config = config | {"conditions": held["conditions"] | config["conditions"]}
                grown = [n for n in _GROWS[1:] if n in held and n in config]
                config |= {n: max((held[n], config[n]), key=lambda x: x if isinstance(x, int) else len(x)) for n in grown}
            else:
                self.answers = [a for a in self.answers if (a.model, a.run) != key]
                self.windows = [w for w in self.windows if (w.model, w.run) != key]
                said = ", in place of a run with other settings"
        self.runs[key] = config
        return said

    def _place(self, row: Answer | Window) -> tuple[Any, ...]:
        runs = [name for stage in self.plan["stages"] for name, _ in runs_of(self.plan, stage)]
        methods = [FULL_NAME, *self.plan["methods"]]
        place = [row.model, _index(runs, row.run), row.context]
        place += [row.task, row.sample] if isinstance(row, Answer) else []
        place += [_index(methods, row.method), row.budget or 0]
        return (*place, 0 if isinstance(row, Answer) else row.first_step)


def _answer(key: tuple[str, str], record: dict[str, Any], names: dict[str, str]) -> Answer:
    attended, estimated = record["attended_tokens"], record.get("estimated_units")
    return Answer(
        *key, record["context"], record["task"], record["sample"], record.get("depth"), names[record["condition"]],
        record["budget"], round(record["score"], 4), None if attended is None else round(attended, 1),
        None if estimated is None else round(estimated, 1),
    )  # fmt: skip


def _windows(key: tuple[str, str], record: dict[str, Any], names: dict[str, str]) -> Iterator[Window]:
    for w in record["windows"]:
        recall = None if w["recall"] is None else round(w["recall"], 4)
        measured = w["first_step"], w["steps"], round(w["agreement"], 4), round(w["kl"], 6), recall
        yield Window(*key, record["context"], names[record["condition"]], record["budget"], *measured)


def _packed(file: Path) -> Iterator[tuple[str, dict[str, Any], list[dict[str, Any]]]]:
    run, config, records = "", {}, []
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        for line in lines:
            held = json.loads(line)
            if "run" not in held:
                records.append(held)
                continue
            if run:
                yield run, config, records
            run, config, records = held["run"], held["config"], []
    if run:
        yield run, config, records


def _key(row: Answer | Window) -> tuple[Any, ...]:
    own = (row.task, row.sample, row.depth) if isinstance(row, Answer) else (row.first_step,)
    return row.model, row.run, row.context, *own, row.method, row.budget


def _condition(answer: Answer) -> tuple[Any, ...]:
    return answer.model, answer.context, answer.task, answer.method, answer.budget


def _index(listed: list[str], name: str) -> int:
    return listed.index(name) if name in listed else len(listed)


def _read(file: Path, kind: type[Any]) -> list[Any]:
    with file.open(newline="", encoding="utf-8") if file.exists() else nullcontext(()) as lines:
        held = [{name: text or None for name, text in row.items()} for row in csv.DictReader(lines)]
    return TypeAdapter(list[kind]).validate_python(held)


def _write(file: Path, kind: type[Any], rows: Iterable[Any]) -> None:
    with file.open("w", newline="", encoding="utf-8") as out:
        lines = csv.DictWriter(out, [f.name for f in fields(kind)], lineterminator="\n")
        lines.writeheader()
        lines.writerows(asdict(row) for row in rows)

"""The page of a run: its configuration, the summary, and a section per task."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

from kvrecall.core.errors import InputFileError, MissingPackageError
from kvrecall.core.whole_files import write_text
from kvrecall.evaluate.intervals import RESAMPLES
from kvrecall.evaluate.runs import Record, read_config, read_records
from kvrecall.evaluate.summary import Row, groups, layer_recall, rounds, summarise, windows

try:
    from jinja2 import Environment

    from kvrecall.evaluate.report import plots
except ModuleNotFoundError as error:
    raise MissingPackageError("matplotlib and jinja2", "plot", error.name) from None

_SHOWN_SAMPLES = 3
"""Answers that are quoted per task and condition."""


def write_page(folder: Path, out: Path) -> dict[str, Any]:
    """Writes the page of a run; returns the numbers of its rows, plots and samples.

    Raises InputFileError for a folder without a run, or a run without a finished sample.
    """
    config, records = read_config(folder), read_records(folder)
    if not records:
        raise InputFileError(folder, "holds no finished sample", "Run `kvrecall eval --out` with it first.")
    rows = summarise(records)
    columns = list(dict.fromkeys((r.task, r.context) for r in rows))
    matrix = {c: {(r.task, r.context): r for r in rows if r.condition == c} for c in dict.fromkeys(r.condition for r in rows)}
    sections = [_section(task, [r for r in rows if r.task == task], records) for task in dict.fromkeys(r.task for r in rows)]
    template = (files("kvrecall") / "data" / "report.html.jinja").read_text(encoding="utf-8")
    # Answers are untrusted text, so everything but the plots is escaped.
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    page = environment.from_string(template).render(
        config=config, columns=columns, matrix=matrix, sections=sections, samples=len(records), resamples=RESAMPLES,
        kinds={row.interval for row in rows}, estimated=any(row.estimated_units for row in rows),
    )  # fmt: skip
    page = page.encode("utf-8", "replace").decode()  # lone surrogates cannot be encoded
    write_text(out, page)
    return {"rows": len(rows), "plots": page.count("<svg"), "samples": len(records), "bytes": len(page.encode())}


def _section(task: str, rows: list[Row], records: list[Record]) -> dict[str, Any]:
    own = [r for r in records if r["task"] == task]
    conditions = list(dict.fromkeys(r.condition for r in rows))
    figures: list[tuple[str, list[str]]] = []
    budgets = [r for r in rows if r.budget is not None]
    if budgets and not any("windows" in r for r in own):
        by_context = groups([r.to_dict() for r in rows], "context")
        found = [plots.accuracy_by_budget([r for r in rows if r.context == context]) for (context,) in by_context]
        titles = ", ".join(f"{context:,}" for (context,) in by_context if context is not None)
        figures.append((f"Score against budget{f' at {titles} tokens' if titles else ''}", found))
    if any(r.get("depth") is not None for r in own):
        figures.append(("Score by depth and context", [plots.heat(own, task, c) for c in conditions]))
    drifted = windows(own)
    for context in dict.fromkeys(length for _, length, _ in drifted):
        lines = {c: w for (_, length, c), w in drifted.items() if length == context}
        steps = [plots.along_steps(lines, name) for name in ("recall", "agreement", "kl")]
        figures.append((f"Along the generated tokens, after a prompt of {context:,} tokens", steps))
    if layers := layer_recall(own):
        figures.append(("Recall of each layer", [plots.by_layer(layers)]))
    if any(row.decode_ms is not None for row in rows):
        figures.append(("Time per generated token", [plots.latency(rows)]))
    quoted = [r for group in groups([r for r in own if r.get("answers")], "condition").values() for r in group[:_SHOWN_SAMPLES]]
    return {
        "task": task, "rows": rows, "figures": figures, "rounds": rounds(own), "windows": drifted, "quoted": quoted,
        "passes": sorted({k for row in rows for k in row.pass_at_k}),
    }  # fmt: skip

"""The figures of notebook/results.md; the same rows give the same bytes."""

from __future__ import annotations

from pathlib import Path

from scripts.tables.evaluation.cases import FULL, Line
from scripts.tables.evaluation.pages import figure_name, generated_lines, swept
from scripts.tables.evaluation.rows import Rows

from kvrecall.evaluate import report as plots
from kvrecall.evaluate.plan import FULL as FULL_METHOD
from kvrecall.evaluate.summary import Row


def draw(rows: Rows, folder: Path) -> list[str]:
    """Writes all figures, removes those of rows that are no more; returns their names."""
    made = {}
    for model, context, comparison in swept(rows):
        made[figure_name("budgets", model, context)] = plots.accuracy_by_budget([_row(line) for line in comparison.lines()])
    for (model, context), lines in generated_lines(rows).items():
        for name in ("recall", "kl"):
            made[figure_name(name, model, context)] = plots.along_steps(lines, name)
    for old in folder.glob("results_*.svg"):
        if old.name not in made:
            old.unlink()
    for name, svg in made.items():
        (folder / name).write_text(svg, encoding="utf-8")
    return list(made)


def _row(line: Line) -> Row:
    """A line as the plots of `kvrecall report` take it."""
    name, budget = line.column
    score, low, high = (x / 100 for x in line.average)
    method = FULL_METHOD if line.column == FULL else name
    return Row("suite", None, name, method, budget, 0, score, low, high, "bootstrap", None, None, None, None, {})

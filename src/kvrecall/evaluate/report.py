"""The page of a run: its configuration, the summary, and a section per task with plots as SVG text.

The same samples give the same bytes.
"""

from __future__ import annotations

import io
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

from kvrecall.core.errors import InputFileError, MissingPackageError
from kvrecall.core.whole_files import write_text
from kvrecall.evaluate.plan import FULL
from kvrecall.evaluate.runs import Record, read_config, read_records
from kvrecall.evaluate.summary import RESAMPLES, Row, groups, heat_map, layer_recall, rounds, summarise, windows

try:
    import matplotlib
    from jinja2 import Environment
    from matplotlib.figure import Figure
except ModuleNotFoundError as error:
    raise MissingPackageError("matplotlib and jinja2", "plot", error.name) from None

_SHOWN_SAMPLES = 3
"""Answers that are quoted per task and condition."""
_STYLE: Any = {"svg.fonttype": "none", "svg.hashsalt": "kvrecall", "font.family": "sans-serif", "font.size": 9}
_LEGEND_WIDTH, _TITLE_WIDTH = 84, 40
"""Most letters of a line below the axes, and of a line beside or above them."""
_WINDOW_AXES = {
    "recall": "recall@100",
    "agreement": "agreement of the likeliest token",
    "kl": "KL from full attention (nats)",
}


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
    records = [r for r in records if r["task"] == task]
    conditions = list(dict.fromkeys(r.condition for r in rows))
    figures: list[tuple[str, list[str]]] = []
    budgets = [r for r in rows if r.budget is not None]
    if budgets and not any("windows" in r for r in records):
        by_context = groups([r.to_dict() for r in rows], "context")
        plots = [accuracy_by_budget([r for r in rows if r.context == context]) for (context,) in by_context]
        titles = ", ".join(f"{context:,}" for (context,) in by_context if context is not None)
        figures.append((f"Score against budget{f' at {titles} tokens' if titles else ''}", plots))
    if any(r.get("depth") is not None for r in records):
        figures.append(("Score by depth and context", [heat(records, task, c) for c in conditions]))
    drifts = windows(records)
    for context in dict.fromkeys(length for _, length, _ in drifts):
        lines = {c: w for (_, length, c), w in drifts.items() if length == context}
        steps = [along_steps(lines, name) for name in ("recall", "agreement", "kl")]
        figures.append((f"Along the generated tokens, after a prompt of {context:,} tokens", steps))
    if layers := layer_recall(records):
        figures.append(("Recall of each layer", [by_layer(layers)]))
    if any(row.decode_ms is not None for row in rows):
        figures.append(("Time per generated token", [latency(rows)]))
    answers = groups([r for r in records if r.get("answers")], "condition").values()
    quotes = [r for group in answers for r in group[:_SHOWN_SAMPLES]]
    return {
        "task": task, "rows": rows, "figures": figures, "rounds": rounds(records), "windows": drifts, "quoted": quotes,
        "passes": sorted({k for row in rows for k in row.pass_at_k}),
    }  # fmt: skip


def accuracy_by_budget(rows: list[Row]) -> str:
    """Score against budget with its 95% interval, a line per method; full attention and tuned methods are level lines."""
    _, axes = _figure()
    names = list(dict.fromkeys(row.method for row in rows))
    for place, method in enumerate(names):
        line = sorted((r for r in rows if r.method == method), key=lambda r: r.budget or 0)
        if line[0].budget is None:
            style = {"color": "black"} if method == FULL else {}
            axes.axhline(line[0].score, linestyle="--", linewidth=1, label=method, **style)
            continue
        # Rounding may put a bound on the wrong side of its mean by one unit in the last place.
        errors = [[max(0.0, r.score - (r.score if r.low is None else r.low)) for r in line],
                  [max(0.0, (r.score if r.high is None else r.high) - r.score) for r in line]]  # fmt: skip
        # Spread around the budget, so that equal scores do not hide one another.
        budgets = [(r.budget or 0) * 2 ** (0.06 * (place - len(names) / 2)) for r in line]
        scores = [r.score for r in line]
        axes.errorbar(budgets, scores, errors, marker="o", markersize=4, capsize=3, linewidth=1.2, label=method)
    axes.set_xscale("log", base=2)
    ticks = sorted({r.budget for r in rows if r.budget is not None})
    axes.set_xticks(ticks, [f"{budget:,}" for budget in ticks])
    axes.minorticks_off()
    axes.set_ylim(-0.03, 1.03)
    return _labelled(axes, "budget (tokens per KV head and step)", "score")


def heat(records: list[Record], task: str, condition: str) -> str:
    """Mean score by depth and context, with the score in each cell."""
    cells = heat_map(records, task, condition)
    depths, contexts = sorted({d for d, _ in cells}), sorted({c for _, c in cells})
    grid = [[cells.get((depth, context), float("nan")) for context in contexts] for depth in depths]
    title = wrapped(condition, _TITLE_WIDTH)
    longest = max(len(line) for line in title.split("\n"))
    figure, axes = _figure(max(1.2 + 0.75 * len(contexts), 0.09 * longest), 0.9 + 0.32 * len(depths) + 0.17 * title.count("\n"))
    # Cells are shapes, because an image would be a bitmap.
    edges = ([i - 0.5 for i in range(count + 1)] for count in (len(contexts), len(depths)))
    axes.pcolormesh(*edges, grid, vmin=0, vmax=1, cmap="RdYlGn")
    axes.invert_yaxis()
    for y, row in enumerate(grid):
        for x, value in enumerate(row):
            color = "white" if value < 0.15 or value > 0.85 else "black"  # both ends of the colour scale are dark
            axes.text(x, y, f"{value:.2f}", ha="center", va="center", fontsize=8, color=color)
    axes.set_xticks(range(len(contexts)), [f"{c:,}" for c in contexts])
    axes.set_yticks(range(len(depths)), [f"{100 * d:.0f}%" for d in depths])
    axes.set_xlabel("context (tokens)")
    axes.set_ylabel("depth")
    figure.suptitle(title, fontsize=9)
    return _svg(figure)


def along_steps(lines: dict[str, list[dict[str, Any]]], name: str) -> str:
    """One measure of a long generation (recall, agreement or kl) over its windows, a line per condition."""
    points = {label: [(w["first_step"], w[name]) for w in line if w[name] is not None] for label, line in lines.items()}
    return _labelled(_lines(points), "generated tokens (first of the window)", _WINDOW_AXES[name])


def by_layer(lines: dict[str, dict[int, float]]) -> str:
    """Recall of each layer, a line per condition."""
    axes = _lines({label: list(layers.items()) for label, layers in lines.items()})
    axes.set_ylim(-0.03, 1.03)
    return _labelled(axes, "layer", "recall@100")


def _lines(lines: dict[str, list[tuple[int, float]]]) -> Any:
    """Axes with a line through the points of each label; a label without points has none."""
    _, axes = _figure()
    for label, points in lines.items():
        if points:
            axes.plot(*zip(*points, strict=True), marker=".", linewidth=1.2, label=label)
    return axes


def latency(rows: list[Row]) -> str:
    """Milliseconds per generated token, a bar per condition and context."""
    rows = [r for r in rows if r.decode_ms is not None]
    names = [r.condition if r.context is None else f"{r.condition} at {r.context:,}" for r in rows]
    labels = [wrapped(name, _TITLE_WIDTH) for name in names]
    most = max((label.count("\n") for label in labels), default=0)
    figure, axes = _figure(6.6 if most else 5.6, 0.7 + (0.22 + 0.13 * most) * len(rows))
    axes.barh(range(len(rows)), [r.decode_ms or 0.0 for r in rows], height=0.7)
    axes.set_yticks(range(len(rows)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("ms per generated token")
    return _svg(figure)


def _figure(width: float = 5.6, height: float = 3.2) -> tuple[Figure, Any]:
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _labelled(axes: Any, x: str, y: str) -> str:
    """The figure with names of its axes. The legend is below them, because names of methods with parameters can be as long as a
    figure is wide."""
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    (lines, names), figure = axes.get_legend_handles_labels(), axes.figure
    if lines:
        names = [wrapped(name, _LEGEND_WIDTH) for name in names]
        figure.set_figheight(figure.get_figheight() + 0.17 * sum(1 + name.count("\n") for name in names))
        figure.legend(lines, names, fontsize=8, frameon=False, loc="outside lower left")
    return _svg(figure)


def wrapped(name: str, width: int) -> str:
    """A condition's name in lines of at most `width` letters, broken after separators; longer parts stay whole."""
    lines, name = [""], name.replace("$", "\\$")  # otherwise matplotlib reads a formula
    for part in re.findall(r"[^;:,@]*[;:,]?|@.*", name):
        if part and lines[-1] and len(lines[-1]) + len(part) > width:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)


def _svg(figure: Figure) -> str:
    out = io.StringIO()
    with matplotlib.rc_context(_STYLE):
        figure.savefig(out, format="svg", metadata={"Date": None})
    # Without XML declaration and document type, for use inside a page.
    return re.sub(r"^.*?(?=<svg)", "", out.getvalue(), flags=re.DOTALL)

"""Plots of a run as SVG text; the same samples give the same bytes."""

from __future__ import annotations

import io
import re
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from kvrecall.evaluate.conditions import FULL
from kvrecall.evaluate.runs import Record
from kvrecall.evaluate.summary import Row, heat_map

_STYLE: Any = {"svg.fonttype": "none", "svg.hashsalt": "kvrecall", "font.family": "sans-serif", "font.size": 9}
_LEGEND_WIDTH, _TITLE_WIDTH = 84, 40
"""Most letters of a line below the axes, and of a line beside or above them."""
_WINDOW_AXES = {
    "recall": "recall@100",
    "agreement": "agreement of the likeliest token",
    "kl": "KL from full attention (nats)",
}


def accuracy_by_budget(rows: list[Row]) -> str:
    """Score against budget with its 95% interval, a line per method; full attention and tuned methods are level lines."""
    figure, axes = _figure()
    names = list(dict.fromkeys(row.method for row in rows))
    for place, method in enumerate(names):
        own = sorted((r for r in rows if r.method == method), key=lambda r: r.budget or 0)
        if own[0].budget is None:
            style = {"color": "black"} if method == FULL else {}
            axes.axhline(own[0].score, linestyle="--", linewidth=1, label=method, **style)
            continue
        spread = [[r.score - (r.low if r.low is not None else r.score) for r in own],
                  [(r.high if r.high is not None else r.score) - r.score for r in own]]  # fmt: skip
        # Spread around the budget, so that equal scores do not hide one another.
        budgets = [(r.budget or 0) * 2 ** (0.06 * (place - len(names) / 2)) for r in own]
        # Rounding may put a bound on the wrong side of its mean by one unit in the last place.
        errors = [[max(0.0, e) for e in side] for side in spread]
        axes.errorbar(budgets, [r.score for r in own], errors, marker="o", markersize=4, capsize=3, linewidth=1.2, label=method)
    axes.set_xscale("log", base=2)
    ticks = sorted({r.budget for r in rows if r.budget is not None})
    axes.set_xticks(ticks, [f"{budget:,}" for budget in ticks])
    axes.minorticks_off()
    axes.set_xlabel("budget (tokens per KV head and step)")
    axes.set_ylabel("score")
    axes.set_ylim(-0.03, 1.03)
    _legend(axes)
    return _svg(figure)


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
    figure, axes = _figure()
    for label, windows in lines.items():
        points = [(w["first_step"], w[name]) for w in windows if w[name] is not None]
        if points:
            axes.plot(*zip(*points, strict=True), marker=".", linewidth=1.2, label=label)
    axes.set_xlabel("generated tokens (first of the window)")
    axes.set_ylabel(_WINDOW_AXES[name])
    _legend(axes)
    return _svg(figure)


def by_layer(lines: dict[str, dict[int, float]]) -> str:
    """Recall of each layer, a line per condition."""
    figure, axes = _figure()
    for label, layers in lines.items():
        axes.plot(list(layers), list(layers.values()), marker=".", linewidth=1.2, label=label)
    axes.set_xlabel("layer")
    axes.set_ylabel("recall@100")
    axes.set_ylim(-0.03, 1.03)
    _legend(axes)
    return _svg(figure)


def latency(rows: list[Row]) -> str:
    """Milliseconds per generated token, a bar per condition and context."""
    timed = [r for r in rows if r.decode_ms is not None]
    said = [r.condition if r.context is None else f"{r.condition} at {r.context:,}" for r in timed]
    labels = [wrapped(name, _TITLE_WIDTH) for name in said]
    most = max((label.count("\n") for label in labels), default=0)
    figure, axes = _figure(6.6 if most else 5.6, 0.7 + (0.22 + 0.13 * most) * len(timed))
    axes.barh(range(len(timed)), [r.decode_ms or 0.0 for r in timed], height=0.7)
    axes.set_yticks(range(len(timed)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("ms per generated token")
    return _svg(figure)


def _figure(width: float = 5.6, height: float = 3.2) -> tuple[Figure, Any]:
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _legend(axes: Any) -> None:
    """A legend below the axes, because names of methods with parameters can be as long as a figure is wide."""
    lines, names = axes.get_legend_handles_labels()
    if lines:
        names, figure = [wrapped(name, _LEGEND_WIDTH) for name in names], axes.figure
        figure.set_figheight(figure.get_figheight() + 0.17 * sum(1 + name.count("\n") for name in names))
        figure.legend(lines, names, fontsize=8, frameon=False, loc="outside lower left")


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

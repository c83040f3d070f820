"""Draws the picture of the README from committed rows: device memory and time per token against context, light and dark.

python -m scripts.readme_picture          (needs `pip install ".[plot]"`)
"""

from __future__ import annotations

from math import isnan
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.ticker import MaxNLocator
from scripts.tables.bench.rows import FOLDER, Row, Table, number, tokens
from scripts.tables.common import ROOT

FIGURES = ROOT / "docs" / "figures"
CONFIG = "balanced-reuse+turning+compiled"
"""Balanced keys, 100 retrieved tokens per KV head, rows used again, queries that turn, compiled modules on both sides."""
PANELS = (
    ("KV cache in GPU memory, GiB", "full_device_gib", "retrieval_device_gib", 8),
    ("time per token, ms", "full_p50_ms", "retrieval_p50_ms", -15),
)
"""Title, columns of full attention and of kvrecall, and where kvrecall's numbers stand: points above their marks."""
COLOURS = {
    "light": {"text": "#1f2933", "grid": "#d5dbe1", "full": "#52606d", "ours": "#00796b"},
    "dark": {"text": "#e4e9ee", "grid": "#3b4550", "full": "#9aa5b1", "ours": "#4db6ac"},
}


def rows() -> list[Row]:
    """Rows of whole models with one sequence, by context, where full attention was measured, too."""
    every = Table.read(FOLDER / "gpu_decode.csv").rows
    whole = [r for r in every if (r["shape"], r["layers"], r["batch"], r["config"]) == ("llama-3.1-8b", "32", "1", CONFIG)]
    return sorted((r for r in whole if not isnan(number(r, "full_p50_ms"))), key=lambda row: int(row["context"]))


def draw(theme: str) -> Path:
    """One file; the same rows give the same bytes."""
    colour = COLOURS[theme]
    plt.rcParams.update({"svg.hashsalt": "kvrecall", "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 11})
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.1))
    for panel, (title, full, ours, above) in zip(axes, PANELS, strict=True):
        _panel(panel, colour, title, [(full, "full", "full attention", 8), (ours, "ours", "kvrecall", above)])
    figure.tight_layout(w_pad=3)
    path = FIGURES / f"memory_and_time-{theme}.svg"
    FIGURES.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, transparent=True, metadata={"Date": None})
    plt.close(figure)
    return path


def _panel(panel: Any, colour: dict[str, str], title: str, lines: list[tuple[str, str, str, int]]) -> None:
    measured = rows()
    contexts = [int(row["context"]) for row in measured]
    for column, who, label, above in lines:
        values = [number(row, column) for row in measured]
        panel.plot(contexts, values, "o-", color=colour[who], linewidth=2.2, markersize=6)
        for context, value in zip(contexts, values, strict=True):
            near = {"textcoords": "offset points", "ha": "center", "color": colour[who]}
            panel.annotate(f"{value:.1f}", (context, value), (-5, above), **near)
        panel.annotate(
            label, (contexts[-1], values[-1]), (14, -4), textcoords="offset points", color=colour[who], weight="bold"
        )
    panel.set_title(title, color=colour["text"], loc="left", fontsize=11)
    panel.set(xscale="log", xlim=(contexts[0] / 1.25, contexts[-1] * 2.6))
    panel.set_ylim(0, 1.2 * max(number(row, lines[0][0]) for row in measured))
    panel.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    panel.set_xticks(contexts, [tokens(n) for n in contexts], color=colour["text"])
    panel.tick_params(axis="y", colors=colour["text"], length=0)
    panel.tick_params(axis="x", which="both", length=0)
    panel.minorticks_off()
    panel.grid(axis="y", color=colour["grid"], linewidth=0.8)
    panel.set_axisbelow(True)
    for side in panel.spines.values():
        side.set_visible(False)


def main() -> None:
    """See the module's text."""
    for theme in COLOURS:
        print(draw(theme).relative_to(ROOT))


if __name__ == "__main__":
    main()

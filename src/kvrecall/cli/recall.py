"""`kvrecall recall`"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from kvrecall.cli import options
from kvrecall.cli.verb import Result, status, verb

_COLUMNS = {
    "coarse_recall": "coarse recall",
    "recall": "recall",
    "mass": "mass",
    "exact_mass": "exact mass",
    "zone_mass_ratio": "zone mass ÷ exact",
    "attended_tokens": "attended",
    "fetched_tokens": "fetched",
}


@verb
def recall(
    trace: Annotated[Path, typer.Argument(help="File written by `kvrecall trace`.")],
    method: options.MethodName = options.DEFAULT_METHOD,
    settings: options.Settings = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the table as Markdown.")] = False,
    as_json: options.AsJson = False,
) -> Result:
    """Replay a method over a trace: recall of the true top-k and attention mass, per layer and in the mean."""
    chosen = options.method_of(method, settings)

    from kvrecall.evaluate.recall import replay
    from kvrecall.evaluate.trace import Trace

    recorded = Trace.load(trace)
    with status(f"replaying {chosen.name} over {len(recorded.layers)} layers", quiet=as_json):
        reports = [report.to_dict() for report in replay(recorded, chosen)]
    if markdown:
        _show_markdown(reports)
    elif not as_json:
        _show(reports)
    info = recorded.info
    return {
        "model": info.model,
        "prompt_tokens": info.prompt_tokens,
        "steps": info.steps,
        "method": chosen.name,
        "layers": reports,
    }


def _show(reports: list[dict[str, Any]]) -> None:
    table = Table("layer", *_COLUMNS.values(), box=None)
    for report in reports:
        table.add_row(*_cells(report), style="bold" if report["layer"] is None else None)
    Console(file=sys.stdout, highlight=False).print(table)


def _show_markdown(reports: list[dict[str, Any]]) -> None:
    print("| layer | " + " | ".join(_COLUMNS.values()) + " |")
    print("|---" * (len(_COLUMNS) + 1) + "|")
    for report in reports:
        print("| " + " | ".join(_cells(report)) + " |")


def _cells(report: dict[str, Any]) -> list[str]:
    cells = ["mean" if report["layer"] is None else str(report["layer"])]
    for name in _COLUMNS:
        value = report[name]
        cells.append("–" if value is None else f"{value:.0f}" if name.endswith("tokens") else f"{value:.3f}")
    return cells

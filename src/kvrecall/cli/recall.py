"""`kvrecall recall`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvrecall.cli import options
from kvrecall.cli.report import plain_table
from kvrecall.cli.screen import results
from kvrecall.cli.verb import Result, status, verb
from kvrecall.core.errors import ParameterError

_COLUMNS = {
    "coarse_recall": "coarse recall",
    "recall": "recall",
    "mass": "mass",
    "exact_mass": "exact mass",
    "zone_mass_ratio": "zone mass ÷ exact",
    "output_error": "output error",
    "attended_tokens": "attended",
    "fetched_tokens": "fetched",
    "searches": "searches",
    "bytes_moved": "bytes moved",
    "reused": "re-used",
}


@verb
def recall(
    trace: Annotated[Path, typer.Argument(help="File written by `kvrecall trace`.")],
    method: options.MethodName = options.DEFAULT_METHOD,
    settings: options.Settings = None,
    truth: Annotated[int | None, typer.Option(min=1, help="Size of the true top-k; the method's top_k if left out.")] = None,
    window: Annotated[
        int | None, typer.Option(min=1, help="Report every so many decode steps, over all layers, instead of every layer.")
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the table as Markdown.")] = False,
    as_json: options.AsJson = False,
) -> Result:
    """Replay a method over a trace: what it finds, attends and moves, per layer or along the steps."""
    if markdown and as_json:
        raise ParameterError("--markdown", "no --json with it", "both", "Leave one of them out.")
    chosen = options.method_of(method, settings)

    from kvrecall.evaluate.recall import replay, replay_windows
    from kvrecall.evaluate.trace import Trace

    recorded = Trace.load(trace)
    with status(f"replaying {chosen.name} over {len(recorded.layers)} layers", quiet=as_json):
        if window is None:
            reports = [report.to_dict() for report in replay(recorded, chosen, truth_k=truth)]
        else:
            drift = replay_windows(recorded, chosen, window, truth_k=truth)
            reports = [{"first_step": first} | report.to_dict() for first, report in drift]
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
    table = plain_table(None, _first(reports), *_COLUMNS.values())
    for report in reports:
        table.add_row(*_cells(report), style="bold" if _label(report) == "mean" else None)
    results().print(table)


def _show_markdown(reports: list[dict[str, Any]]) -> None:
    print(f"| {_first(reports)} | " + " | ".join(_COLUMNS.values()) + " |")
    print("|---" * (len(_COLUMNS) + 1) + "|")
    for report in reports:
        print("| " + " | ".join(_cells(report)) + " |")


def _cells(report: dict[str, Any]) -> list[str]:
    cells = [_label(report)]
    for name in _COLUMNS:
        value = report[name]
        cells.append("–" if value is None else f"{value:.0f}" if name.endswith(("tokens", "moved")) else f"{value:.3f}")
    return cells


def _first(reports: list[dict[str, Any]]) -> str:
    return "first step" if "first_step" in reports[0] else "layer"


def _label(report: dict[str, Any]) -> str:
    if "first_step" in report:
        return str(report["first_step"])
    return "mean" if report["layer"] is None else str(report["layer"])

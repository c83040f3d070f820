"""What the tables share: traces, means, Markdown, and the pages they go into."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from kvrecall.evaluate.recall import LayerRecall, replay
from kvrecall.evaluate.trace import LayerTrace, Trace
from kvrecall.methods import Method

ROOT = Path(__file__).parent.parent.parent
ZONES = {"sink_tokens": 64, "local_tokens": 256, "update_interval": 64}
"""Zones that all methods share where they are compared."""


def cut(trace: Trace, *, steps: int | None = None, layers: tuple[int, ...] | None = None) -> Trace:
    """The first `steps` decode steps of some layers."""
    steps = min(steps or trace.info.steps, trace.info.steps)
    chosen = tuple(n for n in trace.info.layers if layers is None or n in layers)
    tokens = trace.info.prompt_tokens + steps
    kept = {}
    for n in chosen:
        x = trace.layers[n]
        kept[n] = LayerTrace(x.keys[:, :tokens], x.values[:, :tokens], x.queries[:steps], x.prompt_queries, x.statistics)
    return Trace(replace(trace.info, steps=steps, layers=chosen), kept)


def mean(trace: Trace, method: Method, truth_k: int = 100) -> LayerRecall:
    """Mean over layers and steps."""
    return replay(trace, method, truth_k=truth_k)[-1]


def markdown(headings: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """A Markdown table; numbers with three decimals."""
    headings = list(headings)
    lines = ["| " + " | ".join(headings) + " |", "|---" * len(headings) + "|"]
    lines += ["| " + " | ".join(_cell(c) for c in row) + " |" for row in rows]
    return "\n".join(lines)


def fill(page: Path, name: str, text: str) -> None:
    """Replaces a table in a page."""
    page.write_text(filled(page.read_text(), name, text))


def filled(page: str, name: str, text: str) -> str:
    """A page with another text between `<!-- table NAME -->` and the `<!-- end -->` that follows."""
    begin, end = f"<!-- table {name} -->", "<!-- end -->"
    before, rest = page.split(begin)
    return before + begin + "\n\n" + text + "\n\n" + end + rest.split(end, 1)[1]


def _cell(value: object) -> str:
    if value is None:
        return "–"
    return f"{value:.3f}" if isinstance(value, float) else str(value)

"""What the tables share: Markdown, and the pages they go into."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def markdown(headings: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """A Markdown table; numbers with three decimals."""
    headings = list(headings)
    lines = ["| " + " | ".join(headings) + " |", "|---" * len(headings) + "|"]
    lines += ["| " + " | ".join(_cell(c) for c in row) + " |" for row in rows]
    return "\n".join(lines)


def filled(page: str, name: str, text: str) -> str:
    """A page with another text between `<!-- table NAME -->` and the `<!-- end -->` that follows."""
    begin, end = f"<!-- table {name} -->", "<!-- end -->"
    before, rest = page.split(begin)
    return before + begin + "\n\n" + text + "\n\n" + end + rest.split(end, 1)[1]


def _cell(value: object) -> str:
    if value is None:
        return "–"
    return f"{value:.3f}" if isinstance(value, float) else str(value)

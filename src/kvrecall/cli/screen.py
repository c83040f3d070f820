"""Safe output to a terminal: no control characters, no markup in tables, closed streams."""

from __future__ import annotations

import os
import sys
import unicodedata
from collections.abc import Iterable
from copy import copy
from dataclasses import replace
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

_SEPARATORS = "\u2028\u2029"


def printable(text: str) -> str:
    """Text without control characters, because a model may write escape sequences.

    Removes Unicode's category C except newline and tab (C0 and C1 controls, formats such as direction marks, surrogates,
    private and unassigned characters) and the separators of lines and paragraphs.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(c for c in text if c in "\n\t" or not (unicodedata.category(c)[0] == "C" or c in _SEPARATORS))


class Screen(Console):
    """A console that prints strings as plain printable text, and raises errors of writing."""

    def print(self, *objects: Any, **options: Any) -> None:
        """As rich's print, but strings are plain text."""
        super().print(*(Text(printable(o)) if isinstance(o, str) else o for o in objects), **options)

    def on_broken_pipe(self) -> None:
        """Raises the error, which the verb handles."""
        raise


class PlainTable(Table):
    """A table with plain printable text, because names come from files and command lines.

    keys: leading columns that name a row. A table with headings that is too wide is split: further columns follow below, with
    the same leading columns. So no number is cut or wrapped, also in a log of 80 columns. prose: the last column is text, which
    may be wrapped between words.
    """

    def __init__(self, *headings: Any, keys: int = 1, prose: bool = False, **options: Any) -> None:
        super().__init__(*headings, **options)
        self.keys, self.prose = keys, prose

    def add_row(self, *cells: Any, **options: Any) -> None:
        """As rich's, but strings are plain text."""
        super().add_row(*(Text(printable(c)) if isinstance(c, str) else c for c in cells), **options)

    def add_pieces(self, name: str, pieces: Iterable[str], width: int = 56) -> None:
        """Adds a row, name and value, of pieces that are not broken; those beyond `width` columns continue in rows below."""
        line = ""
        for piece in pieces:
            if line and len(line) + 3 + len(piece) > width:
                self.add_row(name, line)
                name = line = ""
            line += (" · " if line else "") + piece
        self.add_row(name, line)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for number, part in enumerate(self._parts(console, options)):
            if number:
                yield Segment.line()
            yield from Table.__rich_console__(part, console, options)

    def _parts(self, console: Console, options: ConsoleOptions) -> list[PlainTable]:
        """The tables to print below each other; this table if it fits or has one column besides the keys."""
        gap, unbounded = self.padding[1], options.update(width=1 << 16)
        widths = [
            max(column.min_width or 0, *(Measurement.get(console, unbounded, cell).maximum for cell in cells)) + gap
            for column in self.columns
            for cells in [(column.header, "", *column.cells)]
        ]
        spare = options.max_width + gap  # the last column has no gap
        if not self.show_header or sum(widths) <= spare:
            return [self]
        if self.prose:
            widths[-1] = min(widths[-1], max(20, spare - sum(widths[:-1])))
        groups: list[list[int]] = [[]]
        left = spare - sum(widths[: self.keys])
        for place in range(self.keys, len(widths)):
            if groups[-1] and sum(widths[at] for at in groups[-1]) + widths[place] > left:
                groups.append([])
            groups[-1].append(place)
        return [self._columns_only([*range(self.keys), *group], first=group is groups[0]) for group in groups]

    def _columns_only(self, places: list[int], first: bool) -> PlainTable:
        """Some of the columns, with all rows; only the first part has the title."""
        part = copy(self)
        part.columns = [replace(self.columns[place], _index=at) for at, place in enumerate(places)]
        part.title = self.title if first else None
        return part


def to_stdout(text: str) -> None:
    """Writes a piece of an answer at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def notes() -> Screen:
    """The console for everything but answers: standard error, so that answers can be piped."""
    return Screen(stderr=True, highlight=False)


def results(width: int | None = None) -> Screen:
    """The console for tables that are a verb's result: standard output."""
    return Screen(file=sys.stdout, highlight=False, width=width)


def opened_streams() -> None:
    """Opens missing standard output or error (`>&-`), because the next opened file would get their number."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            taken = os.open(os.devnull, os.O_WRONLY)
            if taken != number:
                os.dup2(taken, number)
                os.close(taken)
            setattr(sys, name, open(number, "w", encoding="utf-8", closefd=False))  # noqa: SIM115


def discard_stdout() -> None:
    """Drops unwritten output, because Python would write it at exit and print a traceback."""
    try:
        sys.stdout.flush()
        return
    except (OSError, ValueError):
        pass
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
    except (OSError, ValueError):  # a stream without a file, as in tests
        pass

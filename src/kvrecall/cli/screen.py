"""What a verb shows: consoles, tables, sizes and times, progress. Safe output: no control characters, no markup in tables."""

from __future__ import annotations

import sys
import time
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from copy import copy
from dataclasses import replace
from datetime import timedelta
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

OnProgress = Callable[[int, int], None]
_as_json: ContextVar[bool] = ContextVar("as_json", default=False)
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


def as_json() -> bool:
    """Whether the verb that runs prints one JSON object and nothing else: tables, progress and answers are left out then."""
    return _as_json.get()


@contextmanager
def only_json(chosen: bool) -> Iterator[None]:
    """Sets `as_json` inside."""
    before = _as_json.set(chosen)
    try:
        yield
    finally:
        _as_json.reset(before)


def to_stdout(text: str) -> None:
    """Writes a piece of an answer at once."""
    if not as_json():
        sys.stdout.write(text)
        sys.stdout.flush()


def results(width: int | None = None) -> Screen:
    """The console for tables that are a verb's result: standard output."""
    return Screen(file=sys.stdout, highlight=False, width=width, quiet=as_json())


def notes() -> Screen:
    """The console for everything but answers: standard error, so that answers can be piped."""
    return Screen(stderr=True, highlight=False)


def details() -> Screen:
    """As `notes`, for what the JSON object says, too."""
    return Screen(stderr=True, highlight=False, quiet=as_json())


def note(line: str) -> None:
    """A line on standard error."""
    notes().print(line, soft_wrap=True)


def size(count: float | None) -> str:
    """Bytes in binary units: 1536 -> '1.5 KiB'."""
    if count is None:
        return "unknown"
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def settings_text(settings: Mapping[str, Any]) -> str:
    """Settings of a method: "top_k=100, gqa=max"."""
    return ", ".join(f"{name}={value}" for name, value in settings.items())


def method_text(method: str, settings: Mapping[str, Any]) -> str:
    """A method and its settings: "pariskv (top_k=100)"."""
    return f"{method} ({settings_text(settings)})" if settings else method


def seconds(value: float) -> str:
    """Time with a suitable unit: 0.0031 -> '3.1 ms'."""
    return f"{value * 1e3:.1f} ms" if value < 1 else f"{value:.1f} s"


def plain_table(title: str | None = None, *headings: str, keys: int = 1, prose: bool = False) -> PlainTable:
    """A table without frames; two nameless columns, name and value, if there are no headings. keys, prose: see `PlainTable`."""
    table = PlainTable(
        title=title, title_justify="left", box=None, show_header=bool(headings), pad_edge=False, padding=(0, 2, 0, 0),
        keys=keys, prose=prose,
    )  # fmt: skip
    for heading in headings or ("", ""):
        table.add_column(heading)
    return table


@contextmanager
def status(message: str) -> Iterator[None]:
    """A spinner for work without a progress measure."""
    console = notes()
    if as_json() or not console.is_terminal:
        yield
        return
    with console.status(Text(message)):
        yield


@contextmanager
def token_bar(title: str, quiet: bool = False) -> Iterator[OnProgress]:
    """A bar in tokens that vanishes when done; it tells how long the rest will take."""
    console, estimate = notes(), Estimate()
    if quiet or as_json() or not console.is_terminal:
        log = ProgressLog(quiet)

        def tell(done: int, total: int) -> None:
            left = estimate.left(done, total)
            log.print(lambda: f"{title}: {done:,} of {total:,}", last=done >= total, left=left)

        yield tell
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[left]}"), console=console, transient=True) as progress:
        task = progress.add_task(title, total=None, left="")
        yield lambda done, total: progress.update(task, completed=done, total=total, left=_left(estimate.left(done, total)))


class Estimate:
    """How long the rest of some tokens will take. Each costs more than the one before, because it attends to more: up to the
    n-th they take a n + b n^2 seconds, with a and b of what was seen so far."""

    def __init__(self) -> None:
        self._first: tuple[int, float] | None = None
        self._second: tuple[int, float] | None = None

    def left(self, done: int, total: int) -> float | None:
        """Seconds, once some tokens are done; None before, and at the end."""
        now = time.perf_counter()
        if self._first is None:
            self._first = done, now
        begun, start = self._first
        if done <= begun or done >= total:
            return None
        each = (now - start) / (done - begun)
        if self._second is None:
            self._second = done, each
        earlier, cheaper = self._second
        growth = max(0.0, each - cheaper) / (done - earlier) if done > earlier else 0.0
        return (total - done) * (each + growth * (total - begun))


def _left(seconds: float | None) -> str:
    return "" if seconds is None else f"about {timedelta(seconds=round(seconds))} left"


class ProgressLog:
    """Lines on standard error in place of a bar where that is no terminal: what takes seconds leaves none, what takes minutes
    one every half a minute, and one at its end."""

    EVERY_SECONDS = 30.0

    def __init__(self, quiet: bool = False) -> None:
        self.quiet = quiet or as_json()
        self.start = self.last = time.perf_counter()

    def print(self, line: Callable[[], str], last: bool = False, always: bool = False, left: float | None = None) -> None:
        """Writes the line and the time, if it is due. last: nothing follows. always: whether it is due or not. left: seconds
        that the rest will take."""
        now = time.perf_counter()
        elapsed = now - (self.start if last else self.last)
        if self.quiet or not (always or elapsed >= self.EVERY_SECONDS):
            return
        self.last = now
        parts = line(), str(timedelta(seconds=round(now - self.start))), _left(left)
        notes().print(", ".join(filter(None, parts)), soft_wrap=True)


def facts_table(summary: dict[str, Any]) -> PlainTable:
    """The lines under an answer, from its JSON result (see `generate.summary` and `ask.answer_row`)."""
    table, document = plain_table(), "read_seconds" in summary
    tokens, took = ("document_tokens", "read_seconds") if document else ("prompt_tokens", "prefill_seconds")
    verb = "loaded" if _source(summary) == "loading" else "read"
    table.add_row(verb, f"{summary[tokens]:,} tokens in {seconds(summary[took])}")
    table.add_row("attended", attended([summary], summary["searched_from"]))
    _add_drafts(table, [summary])
    first = f", the first after {seconds(summary['first_token_seconds'])}" if document else ""
    table.add_row("answered", f"{summary['new_tokens']:,} tokens in {_pace(summary)}{first}")
    return table


def attended(answers: list[dict[str, Any]], searched_from: int | None) -> str:
    """How many tokens of their prompts the steps of answers attended to, on average. searched_from: tokens below which a
    sequence is attended whole; None for full attention."""
    counts = [answer["stats"]["total"]["attended_per_step"] for answer in answers]
    lengths = [answer["prompt_tokens"] for answer in answers]
    count, tokens = (sum(numbers) / len(answers) for numbers in (counts, lengths))
    if not any(counts):
        return "nothing more: an answer's first token comes with its prompt"
    if any(0 < own < length for own, length in zip(counts, lengths, strict=True)):
        return f"{count:,.0f} tokens per step and KV head, {count / tokens:.0%} of {tokens:,.0f}"
    short = searched_from is not None and max(lengths) < searched_from
    return f"all {tokens:,.0f} tokens" + (f": fewer than the {searched_from:,} of a search" if short else "")


def _add_drafts(table: PlainTable, answers: list[dict[str, Any]]) -> None:
    """The line about answers that full attention has checked."""
    drafts = [answer["drafts"] for answer in answers if answer["drafts"] is not None]
    if drafts:
        checks, drafted, accepted = (sum(each[name] for each in drafts) for name in ("checks", "drafted", "accepted"))
        right = f", {accepted / drafted:.0%} of {drafted:,} drafts right" if drafted else ""
        table.add_row("checked", f"{checks:,} times by full attention{right}")


def _pace(summary: dict[str, Any]) -> str:
    """Seconds of decoding and tokens per second."""
    new, decode = summary["new_tokens"], summary["decode_seconds"]
    return f"{seconds(decode)} ({f'{new / decode:.1f} tokens/s' if decode > 0 else '—'})"


def stats_table(summary: dict[str, Any]) -> PlainTable:
    """All figures about an answer, from its JSON result (see `generate.summary` and `ask.answer_row`)."""
    total = summary["stats"]["total"]
    zones, stages = total["tokens"], total["stage_seconds"]
    tokens = sum(zones.values())
    table = _model_table(summary)
    table.add_row("prompt, answer", f"{summary['prompt_tokens']:,} tokens, {summary['new_tokens']:,} tokens")
    if "read_seconds" in summary:
        times = [seconds(summary[name]) for name in ("read_seconds", "first_token_seconds")]
        table.add_row(f"{_source(summary)}, first, decode", ", ".join([*times, _pace(summary)]))
    else:
        table.add_row("prefill, decode", f"{seconds(summary['prefill_seconds'])}, {_pace(summary)}")
    table.add_pieces("tokens per zone", (f"{name} {count:,}" for name, count in zones.items()))
    share = f" ({total['attended_per_step'] / tokens:.1%} of {tokens:,})" if tokens else ""
    _add_drafts(table, [summary])
    table.add_row("attended per step", f"{total['attended_per_step']:,.0f} tokens per KV head{share}")
    table.add_row("held", f"device {size(total['device_bytes'])}, host {size(total['host_bytes'])}")
    reused = f" ({size(total['bytes_saved'])} re-used)" if total["bytes_saved"] else ""
    table.add_row("rows fetched", size(total["bytes_fetched"]) + reused)
    moved = "nothing: the CPU computes where the rows lie"
    if total["bytes_to_device"] + total["bytes_to_host"]:
        moved = f"to device {size(total['bytes_to_device'])}, to host {size(total['bytes_to_host'])}"
    table.add_row("moved", moved)
    table.add_row("searches, reused rows", f"{total['searches']:,}, {total['reused_rows']:,}")
    if stages:
        table.add_pieces("time per stage", (f"{name} {seconds(value)}" for name, value in stages.items()))
    return table


def _model_table(result: dict[str, Any]) -> PlainTable:
    table = plain_table()
    table.add_row("model, method", f"{result['model']}, {result['method']}")
    if result["settings"]:
        table.add_pieces("settings", (f"{name}={value}" for name, value in result["settings"].items()))
    return table


def _source(result: dict[str, Any]) -> str:
    """How the document came into the cache."""
    return "loading" if result.get("session") and result["session"]["found"] else "reading"


def answers_table(result: dict[str, Any]) -> PlainTable:
    """The table under several answers, from their JSON result."""
    table = _model_table(result)
    answers = result["answers"]
    reading = f"{result['document_tokens']:,} tokens in {seconds(result['read_seconds'])}"
    table.add_row(_source(result), f"{reading}, once for all questions")
    first = [answer["first_token_seconds"] for answer in answers]
    table.add_row("first token", f"{seconds(min(first))} to {seconds(max(first))} after its question")
    new, last = sum(answer["new_tokens"] for answer in answers), max(answer["decode_seconds"] for answer in answers)
    table.add_row("answers", f"{new:,} tokens together, the longest in {seconds(last)}")
    table.add_row("attended", attended(answers, result["searched_from"]))
    _add_drafts(table, answers)
    return table

"""From options to a loaded model, with progress on standard error."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvrecall.cli.report import size
from kvrecall.cli.verb import notes, status
from kvrecall.core.errors import ContextLengthError

OnProgress = Callable[[int, int], None]


@dataclass(frozen=True)
class Session:
    """A model that is ready, and what the options said about it."""

    model: Any
    tokenizer: Any
    name: str
    load_seconds: float

    @property
    def limit_tokens(self) -> int | None:
        """Tokens that the model's context holds, prompt and answer together; None if its config does not say."""
        from kvrecall.engine.prefill import context_limit

        return context_limit(self.model)

    def token_ids(self, text: str, most: int | None = None) -> list[int]:
        """Tokens of a text, the first `most` of them; raises ContextLengthError if the model's context cannot hold them."""
        ids = self.tokenizer(text).input_ids[:most]
        if self.limit_tokens and len(ids) > self.limit_tokens:
            raise ContextLengthError("text", self.limit_tokens, len(ids))
        return ids

    def tensor(self, ids: list[int]) -> Any:
        """Token ids as a batch of one on the model's device."""
        import torch

        return torch.tensor([ids], device=self.model.device, dtype=torch.int64)


def open_session(name: str, dtype: str | None, device: str | None, quiet: bool = False) -> Session:
    """Fetches what is missing of a known model or of a hub repository, and loads it."""
    from kvrecall import models

    source = models.resolve(name)
    if source.kind == "hub" or (source.kind == "known" and models.find(name) is None):
        with download_bar(f"fetching {name}", quiet) as on_progress:
            models.pull(name, on_progress)
    start = time.perf_counter()
    with status(f"loading {name} (the first time takes half a minute)", quiet):
        model, tokenizer = models.load(name, dtype=dtype, device=device, on_notice=note)
    return Session(model, tokenizer, name, time.perf_counter() - start)


def note(said: str) -> None:
    """A line on standard error."""
    notes().print(said, soft_wrap=True)


def download_bar(title: str, quiet: bool = False) -> AbstractContextManager[OnProgress]:
    """A bar in bytes that vanishes when done."""
    return _bar(title, DownloadColumn(binary_units=True), quiet)


def token_bar(title: str, quiet: bool = False) -> AbstractContextManager[OnProgress]:
    """A bar in tokens that vanishes when done."""
    return _bar(title, MofNCompleteColumn(), quiet)


@contextmanager
def _bar(title: str, count: Any, quiet: bool) -> Iterator[OnProgress]:
    console = notes()
    if quiet or not console.is_terminal:
        log = ProgressLog(quiet)
        in_bytes = isinstance(count, DownloadColumn)
        written = size if in_bytes else "{:,}".format
        # A download says its size before its first byte.
        yield lambda done, total: log.tell(
            lambda: f"{title}: {written(done)} of {written(total)}", last=done >= total, always=in_bytes and not done
        )
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), count, TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(title, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


class ProgressLog:
    """Lines on standard error in place of a bar where that is no terminal: what takes seconds leaves none, what takes minutes
    one every half a minute, and one at its end."""

    EVERY_SECONDS = 30.0

    def __init__(self, quiet: bool = False) -> None:
        self.quiet = quiet
        self.start = self.told = time.perf_counter()

    def tell(self, line: Callable[[], str], last: bool = False, always: bool = False) -> None:
        """Writes the line and the time, if it is due. last: nothing follows. always: whether it is due or not."""
        now = time.perf_counter()
        waited = now - (self.start if last else self.told)
        if self.quiet or not (always or waited >= self.EVERY_SECONDS):
            return
        self.told = now
        notes().print(f"{line()}, {timedelta(seconds=round(now - self.start))}", soft_wrap=True)

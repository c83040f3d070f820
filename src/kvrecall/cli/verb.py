"""What all verbs share: results as JSON, errors as one line, Ctrl-C as one word."""

from __future__ import annotations

import contextlib
import functools
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec

import typer
from rich.console import Console
from rich.text import Text

from kvrecall.cli import EXIT_ERROR, EXIT_INTERRUPTED
from kvrecall.errors import KVRecallError

P = ParamSpec("P")
Result = dict[str, Any]


def notes() -> Console:
    """The console for everything that is not the answer itself: standard error, so that answers can be piped."""
    return Console(stderr=True, highlight=False)


def verb(run: Callable[P, Result]) -> Callable[P, None]:
    """Makes a command of a function that returns its result and has a parameter `as_json`.

    With --json the result is the only thing on standard output; whatever a library prints there meanwhile goes to standard
    error. A `KVRecallError` becomes one line and exit code 2, Ctrl-C exit code 130.
    """

    @functools.wraps(run)
    def command(*args: P.args, **kwargs: P.kwargs) -> None:
        as_json = bool(kwargs.get("as_json"))
        try:
            with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
                result = run(*args, **kwargs)
        except KeyboardInterrupt:
            notes().print("interrupted")
            raise typer.Exit(EXIT_INTERRUPTED) from None
        except Exception as error:
            shown = _shown(error)
            if shown is None:
                raise
            if as_json:
                print(json.dumps({"error": {"type": type(error).__name__, "message": shown}}))
            else:
                # Text, not markup: messages quote what users typed, brackets included.
                notes().print(Text(f"error: {shown}", style="red"), soft_wrap=True)
            raise typer.Exit(EXIT_ERROR) from None
        if as_json:
            print(json.dumps(result, ensure_ascii=False, default=str))

    return command


@contextlib.contextmanager
def status(message: str, quiet: bool = False) -> Iterator[None]:
    """A spinner while something without a measure of progress goes on."""
    console = notes()
    if quiet or not console.is_terminal:
        yield
        return
    with console.status(Text(message)):
        yield


def _shown(error: Exception) -> str | None:
    """The line that a user sees, or None for an error that is ours."""
    if isinstance(error, KVRecallError):
        return " ".join(str(error).split())
    if type(error).__name__ == "OutOfMemoryError":
        return "device memory is exhausted. Lower --chunk-tokens, shorten the prompt, or see `kvrecall plan`."
    return None

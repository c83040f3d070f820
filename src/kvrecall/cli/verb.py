"""Shared behaviour of verbs: results as JSON, errors as one line, Ctrl-C."""

from __future__ import annotations

import contextlib
import functools
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec

import typer
from rich.text import Text

from kvrecall.cli.exits import EXIT_BROKEN_PIPE, EXIT_ERROR, EXIT_INTERRUPTED
from kvrecall.cli.screen import discard_stdout, notes, printable
from kvrecall.core.errors import KVRecallError

__all__ = ["Result", "notes", "status", "told", "verb"]

P = ParamSpec("P")
Result = dict[str, Any]


def verb(run: Callable[P, Result]) -> Callable[P, None]:
    """Makes a command of a function that returns its result and has a parameter `as_json`.

    With --json only the result goes to standard output; prints of libraries go to standard error. Errors are handled by `told`.
    """

    @functools.wraps(run)
    def command(*args: P.args, **kwargs: P.kwargs) -> None:
        as_json = bool(kwargs.get("as_json"))
        with told(as_json), _warnings_as_notes():
            with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
                result = run(*args, **kwargs)
            if as_json:
                print(json.dumps(result, ensure_ascii=False, default=str).encode("utf-8", "backslashreplace").decode())
            sys.stdout.flush()  # here, so that a full disk is reported

    return command


@contextlib.contextmanager
def told(as_json: bool) -> Iterator[None]:
    """Turns exceptions of the body into exit codes. as_json: errors are printed to standard output as JSON.

    A `KVRecallError`, or an OSError about a file, becomes one line and exit code 2; Ctrl-C exit code 130. If the reader of the
    output stops (`| head`), the verb ends silently with exit code 141, like other programs.
    """
    try:
        yield
    except KeyboardInterrupt:
        _tell("interrupted")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except BrokenPipeError:
        discard_stdout()
        raise typer.Exit(EXIT_BROKEN_PIPE) from None
    except Exception as error:
        shown = _shown(error)
        if shown is None:
            raise
        try:
            if as_json:
                print(json.dumps({"error": {"type": type(error).__name__, "message": shown}}), flush=True)
            else:
                _tell(f"error: {shown}", "red")
        except OSError:  # standard output itself cannot be written
            _tell(f"error: {shown}", "red")
        discard_stdout()
        raise typer.Exit(EXIT_ERROR) from None


def _tell(said: str, style: str = "") -> None:
    """Prints a line to standard error, if possible."""
    with contextlib.suppress(OSError):
        # Plain text, because messages quote user input, brackets included.
        notes().print(Text(printable(said), style=style), soft_wrap=True)


@contextlib.contextmanager
def _warnings_as_notes() -> Iterator[None]:
    """Prints warnings as one line each to standard error, without the place in the code."""

    def show(message: Warning | str, *_: object, **__: object) -> None:
        _tell(f"note: {' '.join(str(message).split())}")

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


@contextlib.contextmanager
def status(message: str, quiet: bool = False) -> Iterator[None]:
    """A spinner for work without a progress measure."""
    console = notes()
    if quiet or not console.is_terminal:
        yield
        return
    with console.status(Text(message)):
        yield


def _shown(error: Exception) -> str | None:
    """The line for the user, or None for an internal error."""
    if isinstance(error, KVRecallError):
        return " ".join(printable(str(error)).split())
    if isinstance(error, OSError):
        name = f"{error.filename}: " if error.filename else ""
        return " ".join(printable(f"{name or 'standard output or a file: '}{error.strerror or error}").split())
    if isinstance(error, MemoryError):
        return "memory is exhausted. Shorten the input or lower the options that count tokens."
    if type(error).__name__ == "OutOfMemoryError":
        return "device memory is exhausted. Lower --chunk-tokens, shorten the prompt, or see `kvrecall plan`."
    return None

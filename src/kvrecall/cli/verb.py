"""What all verbs share: results as JSON, errors as one line, Ctrl-C as one word."""

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

    With --json the result is the only thing on standard output; whatever a library prints there meanwhile goes to standard
    error. Errors end it as `told` says.
    """

    @functools.wraps(run)
    def command(*args: P.args, **kwargs: P.kwargs) -> None:
        as_json = bool(kwargs.get("as_json"))
        with told(as_json), _warnings_as_notes():
            with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
                result = run(*args, **kwargs)
            if as_json:
                print(json.dumps(result, ensure_ascii=False, default=str).encode("utf-8", "backslashreplace").decode())
            sys.stdout.flush()  # here, where a full disk can still be told

    return command


@contextlib.contextmanager
def told(as_json: bool) -> Iterator[None]:
    """Ends the process as a verb does when its body raises; as_json: errors are told on standard output, as JSON.

    A `KVRecallError`, and what the system says about a file, become one line and exit code 2, Ctrl-C exit code 130. Who
    reads the output and stops (`| head`) ends a verb without a word and with exit code 141, as other programs.
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
    """A line on standard error, if that can be written."""
    with contextlib.suppress(OSError):
        # Text, not markup: messages quote what users typed, brackets included.
        notes().print(Text(printable(said), style=style), soft_wrap=True)


@contextlib.contextmanager
def _warnings_as_notes() -> Iterator[None]:
    """Warnings become one line each on standard error, without the place in our code that a program's author would want."""

    def show(message: Warning | str, *_: object, **__: object) -> None:
        _tell(f"note: {' '.join(str(message).split())}")

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


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
        return " ".join(printable(str(error)).split())
    if isinstance(error, OSError):
        name = f"{error.filename}: " if error.filename else ""
        return " ".join(printable(f"{name or 'standard output or a file: '}{error.strerror or error}").split())
    if isinstance(error, MemoryError):
        return "memory is exhausted. Shorten the input or lower the options that count tokens."
    if type(error).__name__ == "OutOfMemoryError":
        return "device memory is exhausted. Lower --chunk-tokens, shorten the prompt, or see `kvrecall plan`."
    return None

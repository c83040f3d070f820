"""Shared behaviour of verbs: results as JSON, errors as one line, Ctrl-C."""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Annotated, Any

import typer
from rich.text import Text

from kvrecall.cli.process import EXIT_BROKEN_PIPE, EXIT_ERROR, EXIT_INTERRUPTED, discard_stdout
from kvrecall.cli.screen import notes, only_json, printable
from kvrecall.core.errors import KVRecallError

Result = dict[str, Any]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


def verb(run: Callable[..., Result]) -> Callable[..., None]:
    """Makes a command with the option --json of a function that returns its result. A parameter whose type is a dataclass
    stands for options, which are its fields.

    With --json only the result goes to standard output; prints of libraries go to standard error. `report_errors` handles
    errors.
    """
    parameters = inspect.signature(run, eval_str=True).parameters.values()
    groups: dict[str, Any] = {p.name: p.annotation for p in parameters if is_dataclass(p.annotation)}

    @functools.wraps(run)
    def command(*, as_json: bool, **values: Any) -> None:
        with report_errors(as_json), _warnings_as_notes():
            with only_json(as_json), contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
                for name, kind in groups.items():
                    values[name] = kind(**{field.name: values.pop(field.name) for field in fields(kind)})
                result = run(**values)
            if as_json:
                print(json.dumps(result, ensure_ascii=False, default=str).encode("utf-8", "backslashreplace").decode())
            sys.stdout.flush()  # here, so that a full disk is reported

    options: list[inspect.Parameter] = []
    for parameter in parameters:
        kind = groups.get(parameter.name)
        options += [parameter] if kind is None else inspect.signature(kind, eval_str=True).parameters.values()
    options.append(inspect.Parameter("as_json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=AsJson))
    options = [option.replace(kind=inspect.Parameter.KEYWORD_ONLY) for option in options]
    command.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    return command


@contextlib.contextmanager
def report_errors(as_json: bool) -> Iterator[None]:
    """Turns exceptions of the body into exit codes. as_json: errors are printed to standard output as JSON.

    A `KVRecallError`, or an OSError about a file, becomes one line and exit code 2; Ctrl-C exit code 130. If the reader of the
    output stops (`| head`), the verb ends silently with exit code 141, like other programs.
    """
    try:
        yield
    except KeyboardInterrupt:
        _print_line("interrupted")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except BrokenPipeError:
        discard_stdout()
        raise typer.Exit(EXIT_BROKEN_PIPE) from None
    except Exception as error:
        message = _message(error)
        if message is None:
            raise
        try:
            if as_json:
                print(json.dumps({"error": {"type": type(error).__name__, "message": message}}), flush=True)
            else:
                _print_line(f"error: {message}", "red")
        except OSError:  # standard output itself cannot be written
            _print_line(f"error: {message}", "red")
        discard_stdout()
        raise typer.Exit(EXIT_ERROR) from None


def _print_line(line: str, style: str = "") -> None:
    """Prints a line to standard error, if possible."""
    with contextlib.suppress(OSError):
        # Plain text, because messages quote user input, brackets included.
        notes().print(Text(printable(line), style=style), soft_wrap=True)


@contextlib.contextmanager
def _warnings_as_notes() -> Iterator[None]:
    """Prints warnings as one line each to standard error, without the place in the code."""

    def show(message: Warning | str, *_: object, **__: object) -> None:
        _print_line(f"note: {' '.join(str(message).split())}")

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


def _message(error: Exception) -> str | None:
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

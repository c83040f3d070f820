"""Text from files and arguments, and places for results, checked before anything slow starts."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from kvrecall.core import texts
from kvrecall.core.errors import OutputFileError, ParameterError


def read_text(path: Path) -> str:
    """As `core.texts.read_text`; `-` reads standard input."""
    return texts.read_text(path, sys.stdin.buffer.read() if str(path) == "-" else None)


def read_texts(paths: list[Path]) -> str:
    """The files' texts, joined by blank lines."""
    return "\n\n".join(map(read_text, paths))


def non_empty(text: str, name: str) -> str:
    """Returns the text; raises `ParameterError` if it is empty."""
    if not text.strip():
        raise ParameterError(name, "some text", text, "Ask something.")
    return text


def writable(path: Path) -> Path:
    """Returns the path of a file of results; raises `OutputFileError` if it cannot be written.

    Tests it by opening the file. Existing content stays, and no file is left behind.
    """
    target = os.path.realpath(path)
    try:
        try:
            made = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        except FileExistsError:  # must not be removed; opening a pipe without a reader would block
            os.close(os.open(target, os.O_WRONLY | getattr(os, "O_NONBLOCK", 0)))
        else:
            os.close(made)
            os.unlink(target)
    except OSError as error:
        raise OutputFileError(path, f"cannot be written ({error.strerror})") from None
    return path


def writable_folder(path: Path) -> Path:
    """Returns the path of a folder of results; raises `OutputFileError` if it cannot be made. Does not make it."""
    there = next(place for place in (path, *path.absolute().parents) if place.exists())
    if not there.is_dir():
        raise OutputFileError(path, f"cannot be a folder for results ({there} is a file)")
    if not os.access(there, os.W_OK | os.X_OK):
        raise OutputFileError(path, f"cannot be a folder for results ({there} may not be written to)")
    return path

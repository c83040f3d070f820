"""Text from files and arguments, and places for results, checked before anything slow starts."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from kvrecall.core.errors import InputFileError, OutputFileError, ParameterError


def read_text(path: Path) -> str:
    """A UTF-8 file's text (`-` reads standard input); raises `InputFileError` if it cannot be read or holds only whitespace."""
    try:
        data = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
    except OSError as error:
        raise InputFileError(path, f"cannot be read ({error.strerror})") from error
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputFileError(path, f"is not UTF-8 text (byte {error.start:,})") from error
    if not text.strip():
        raise InputFileError(path, "is empty" if not text else "holds only whitespace")
    return text


def read_texts(paths: list[Path]) -> str:
    """The files' texts one after the other, a blank line between."""
    return "\n\n".join(map(read_text, paths))


def non_empty(text: str, name: str) -> str:
    """The text as it is; raises `ParameterError` if there is nothing in it."""
    if not text.strip():
        raise ParameterError(name, "some text", text, "Ask something.")
    return text


def writable(path: Path) -> Path:
    """A path for a file of results, as it is; raises `OutputFileError` if none can be written there.

    Opened to see, since permissions alone do not tell; what is there stays as it is, and nothing is left behind.
    """
    target = os.path.realpath(path)
    try:
        try:
            made = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        except FileExistsError:  # not ours to remove; a pipe that nobody reads must not be waited for
            os.close(os.open(target, os.O_WRONLY | getattr(os, "O_NONBLOCK", 0)))
        else:
            os.close(made)
            os.unlink(target)
    except OSError as error:
        raise OutputFileError(path, f"cannot be written ({error.strerror})") from None
    return path


def writable_folder(path: Path) -> Path:
    """A path for a folder of results, as it is; raises `OutputFileError` if none can be made there, and makes none yet."""
    there = next(place for place in (path, *path.absolute().parents) if place.exists())
    if not there.is_dir():
        raise OutputFileError(path, f"cannot be a folder for results ({there} is a file)")
    if not os.access(there, os.W_OK | os.X_OK):
        raise OutputFileError(path, f"cannot be a folder for results ({there} may not be written to)")
    return path

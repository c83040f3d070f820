"""Text from files and arguments, checked before anything slow starts."""

from __future__ import annotations

import sys
from pathlib import Path

from kvrecall.errors import InputFileError, ParameterError


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

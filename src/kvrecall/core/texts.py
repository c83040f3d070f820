"""Texts, and the files that hold them: a file's name is never taken for a text."""

from __future__ import annotations

import os
import re
from pathlib import Path

from kvrecall.core.errors import InputFileError, ParameterError

_NAME = re.compile(r"(?=.*[/\\]|.*\.[A-Za-z][A-Za-z0-9]{0,7}$)[\w.\-~+@%:/\\]+")
"""What looks like a path or an address: one word with a separator, or with a suffix."""


def read_text(path: str | os.PathLike[str], data: bytes | None = None) -> str:
    """A UTF-8 file's text. data: its content, if it is known.

    Raises InputFileError if it cannot be read, is not UTF-8, or holds only whitespace.
    """
    try:
        data = Path(path).read_bytes() if data is None else data
    except OSError as error:
        raise InputFileError(path, f"cannot be read ({error.strerror})") from error
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputFileError(path, f"is not UTF-8 text (byte {error.start:,})") from error
    if not text.strip():
        raise InputFileError(path, "is empty" if not text else "holds only whitespace")
    return text


def check_no_name(name: str, text: str, remedy: str, *, existing: bool = False) -> None:
    """Raises ParameterError for a text that is the name of a file or folder, or looks like one. name: of the parameter.

    existing: whether only names of what exists are refused.
    """
    try:
        there = os.path.exists(text)
    except ValueError:  # a NUL character
        return
    if there or (not existing and _NAME.fullmatch(text)):
        kind = "folder" if os.path.isdir(text) else "file"
        got = f"the name of a {kind}, {text[:200]!r}" if there else f"what looks like a file's name, {text[:200]!r}"
        raise ParameterError(name, "a text", got, remedy)

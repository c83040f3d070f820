"""Texts that users give, the counts in them, and the files that hold them: a file's name is never taken for a text."""

from __future__ import annotations

import os
import re
from operator import index
from pathlib import Path
from typing import Any

from kvrecall.core.documents import document_text, is_document
from kvrecall.core.errors import InputFileError, ParameterError

_NAME = re.compile(r"(?=.*[/\\]|.*\.[A-Za-z][A-Za-z0-9]{0,7}$)[\w.\-~+@%:/\\]+")
"""What looks like a path or an address: one word with a separator, or with a suffix."""


def read_text(path: str | os.PathLike[str], data: bytes | None = None) -> str:
    """A UTF-8 file's text, or that of a document (`core.documents`). data: its content, if it is known.

    Raises InputFileError if it cannot be read, is not UTF-8, or holds only whitespace, and MissingPackageError for a document
    that needs a package.
    """
    try:
        data = Path(path).read_bytes() if data is None else data
    except OSError as error:
        raise InputFileError(path, f"cannot be read ({error.strerror})") from error
    if data and is_document(path):
        return document_text(path, data)
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


def byte_count(text: str, name: str) -> int:
    """Bytes of a text such as 500m (= 500 MiB), 32g, 1t or 1048576. name: what the text was given for, in the error's words.

    Raises ParameterError.
    """
    plain = text.strip().lower().removesuffix("b").removesuffix("i")
    factor = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}.get(plain[-1:], 1)
    count = whole(plain[:-1] if factor > 1 else plain) * factor
    if not 0 <= count < 1 << 63:
        raise ParameterError(name, "bytes such as 500m, 32g or 1t", text, "Give a whole number with its unit.")
    return count


def integer(name: str, value: Any, remedy: str, least: int | None = None) -> int:
    """An integer, or a tensor or array of one, from `least` on. Raises ParameterError for all else, also True and False."""
    try:
        number = index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or (least is not None and number < least):
        raise ParameterError(name, "an integer" if least is None else f"an integer >= {least}", value, remedy)
    return number


def check_seed(name: str, seed: Any) -> None:
    """Raises ParameterError for a seed that torch does not accept. None takes another one every time."""
    remedy = "Give an integer of 64 bits, or none for another one every time."
    if seed is not None and not -(1 << 63) <= integer(name, seed, remedy) < 1 << 64:
        raise ParameterError(name, "an integer of 64 bits", seed, remedy)


def whole(text: str) -> int:
    """The number of a text of the digits 0 to 9; -1 for any other, and for more digits than any count has."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else -1


def split_at_commas(text: str) -> list[str]:
    """Splits at commas outside brackets and quotes."""
    parts, depth, quoted = [""], 0, False
    for letter in text:
        quoted ^= letter == '"'
        depth = max(0, depth + (0 if quoted else {"[": 1, "{": 1, "]": -1, "}": -1}.get(letter, 0)))
        if letter == "," and not quoted and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return parts

"""Writes files completely or not at all, and parses untrusted JSON and TOML, with `ValueError` for every mistake."""

from __future__ import annotations

import errno
import json
import os
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from math import isinf
from pathlib import Path
from reprlib import Repr
from typing import TYPE_CHECKING, Any

from kvrecall.core.errors import OutputFileError

if TYPE_CHECKING:
    from pydantic import ValidationError
    from torch import Tensor

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers for a full disk."""


def parse_json(text: str, *, finite: bool = True) -> Any:
    """The value of a JSON text; raises ValueError, also for brackets nested too deeply, a key that is given twice and, if
    finite, for NaN and infinity."""
    more: dict[str, Any] = {"parse_constant": _constant, "parse_float": _float} if finite else {}
    try:
        return json.loads(text, object_pairs_hook=_once, **more)
    except RecursionError:
        raise ValueError("brackets are nested too deeply") from None


def parse_toml(text: str) -> dict[str, Any]:
    """The table of a TOML text; raises ValueError, also for brackets nested too deeply."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("brackets are nested too deeply") from None


def first_mistake(error: ValidationError) -> str:
    """The first mistake: place, expected, given."""
    mistake = error.errors()[0]
    where = ".".join(str(step) for step in mistake["loc"]) or "the file"
    said = mistake["msg"].removeprefix("Value error, ")
    return f"{where}: {said[:1].lower()}{said[1:]}, got {_SHORT.repr(mistake['input'])}"


_SHORT = Repr()
"""Limits the text of a given value, which may have any size and depth."""
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 80


@contextmanager
def whole_file(path: str | Path) -> Iterator[Path]:
    """Yields the name of a draft, which replaces the file at the end of the block; after an error it is removed.

    Devices, pipes, and files in a folder without write permission are written to directly. A new file has the permissions that
    the user's umask gives, a replaced one keeps its own. Raises OutputFileError.
    """
    target = Path(os.path.realpath(path))
    there = target.exists()
    direct = there and (not target.is_file() or not os.access(target.parent, os.W_OK | os.X_OK))
    draft = target if direct else target.with_name(f".{os.getpid()}-{os.urandom(4).hex()}.draft")
    with written_to(path):
        try:
            if there and not direct:  # until it has the permissions of the file, nobody else may read it
                os.close(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            yield draft
            if not direct:
                if there:
                    draft.chmod(target.stat().st_mode & 0o7777)
                os.replace(draft, target)
        finally:
            if not direct:
                with suppress(OSError):
                    draft.unlink()


def write_text(path: str | Path, text: str) -> None:
    """Writes a UTF-8 text file completely or not at all. Raises OutputFileError."""
    with whole_file(path) as draft, draft.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        if draft.is_file():
            os.fsync(file.fileno())


def write_tensors(path: str | Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Writes a safetensors file completely or not at all. Raises OutputFileError."""
    from safetensors import SafetensorError
    from safetensors.torch import save, save_file

    with whole_file(path) as draft:
        if draft == Path(os.path.realpath(path)):  # a pipe or a device, which `save_file` would replace by a file
            draft.write_bytes(save(tensors, metadata))
            return
        try:
            save_file(tensors, draft, metadata=metadata)
        except SafetensorError as error:
            raise OSError(f"{error}") from error


@contextmanager
def written_to(path: object) -> Iterator[None]:
    """Turns OSErrors of writing a file into OutputFileError."""
    try:
        yield
    except OutputFileError:
        raise
    except OSError as error:
        raise unwritable(path, error) from error


def unwritable(path: object, error: OSError) -> OutputFileError:
    """The error for a file that cannot be written, with the remedy that fits."""
    remedy = "Free some space, or give a name on another disk." if error.errno in _FULL else None
    return OutputFileError(path, f"cannot be written ({error.strerror or error})", *([remedy] if remedy else []))


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)[:40]!r} twice in one object")
    return table


def _constant(name: str) -> float:
    raise ValueError(f"{name} is not a number of JSON")


def _float(text: str) -> float:
    value = float(text)
    if isinf(value):
        raise ValueError(f"{text[:40]} is too large a number")
    return value

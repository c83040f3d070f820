"""Method files: a name, settings and their origin; JSON or TOML, checked when read.

{"method": "pariskv", "settings": {"top_k": 128, "per_layer": {"3": {"top_k": 64}}}, "layers": 24, "about": {...}}
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvrecall.core.errors import InputFileError, KVRecallError
from kvrecall.core.whole_files import first_mistake, parse_json, parse_toml, write_text
from kvrecall.methods.base import Method
from kvrecall.methods.registry import name_of
from kvrecall.methods.settings import from_settings, settings_of

_SUFFIXES = (".json", ".toml")
_REMEDY = "docs/guide/evaluate.md shows the form; `kvrecall tune` writes such files."


class MethodFile(BaseModel):
    """The content of a method file.

    settings: fields of the method that differ from its defaults, parts as text. layers: number of layers of the model that it
    is for, None for any. about: its origin, for people.
    """

    model_config = ConfigDict(extra="forbid")

    method: str
    settings: dict[str, Any] = Field(default_factory=dict)
    layers: int | None = Field(default=None, ge=1)
    about: dict[str, Any] = Field(default_factory=dict)


def load_method(path: str | Path, layers: int | None = None) -> Method:
    """The method of a file. layers: those of the model it is for, if known.

    Raises InputFileError naming the file, the field, and what was expected of it.
    """
    path = Path(path)
    try:
        content = MethodFile.model_validate(_parsed(path))
    except ValidationError as error:
        raise InputFileError(path, first_mistake(error), _REMEDY) from None
    if layers is not None and content.layers not in (None, layers):
        problem = f"layers: expected a file for the model's {layers} layers, got one for {content.layers}"
        raise InputFileError(path, problem, "Run `kvrecall tune` with this model.")
    try:
        return from_settings(content.method, content.settings)
    except KVRecallError as error:
        raise InputFileError(path, error.problem, error.remedy or _REMEDY) from None


def save_method(method: Method, path: str | Path, *, layers: int | None = None, about: dict[str, Any] | None = None) -> None:
    """Writes a method as JSON; `load_method` gives an equal one back. layers, about: see `MethodFile`.

    Raises OutputFileError.
    """
    content = MethodFile(method=name_of(method), settings=settings_of(method), layers=layers, about=about or {})
    text = json.dumps(content.model_dump(), indent=1, ensure_ascii=False) + "\n"
    write_text(path, text)


def _parsed(path: Path) -> Any:
    if path.suffix not in _SUFFIXES:
        raise InputFileError(path, f"expected a name ending in {' or '.join(_SUFFIXES)}", _REMEDY)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputFileError(path, f"cannot be read ({error.strerror})", _REMEDY) from error
    except UnicodeDecodeError as error:
        raise InputFileError(path, f"is not UTF-8 text (byte {error.start:,})", _REMEDY) from None
    try:
        return parse_toml(text) if path.suffix == ".toml" else parse_json(text)
    except ValueError as error:  # both parsers' messages have line and column
        raise InputFileError(path, f"is not {path.suffix[1:].upper()} ({error})", _REMEDY) from None

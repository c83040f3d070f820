"""Methods in files: a name, its settings, and what they were found on; JSON or TOML, checked when read.

{"method": "pariskv", "settings": {"top_k": 128, "per_layer": {"3": {"top_k": 64}}}, "layers": 24, "about": {...}}
"""

from __future__ import annotations

import json
import tomllib
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from kvrecall.errors import InputFileError, KVRecallError, UnknownNameError
from kvrecall.methods.base import Method
from kvrecall.methods.registry import method_class, name_of
from kvrecall.parts import Part

_SUFFIXES = (".json", ".toml")
_REMEDY = "docs/evaluation.md shows the form; `kvrecall tune` writes such files."


class MethodFile(BaseModel):
    """What a method file holds.

    settings: fields of the method that differ from its defaults, parts as text. layers: how many the model has that it was
    made for, None for any. about: where it comes from, for people.
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
        held = MethodFile.model_validate(_parsed(path))
    except ValidationError as error:
        raise InputFileError(path, _first(error), _REMEDY) from None
    if layers is not None and held.layers not in (None, layers):
        problem = f"layers: expected a file for the model's {layers} layers, got one for {held.layers}"
        raise InputFileError(path, problem, "Run `kvrecall tune` with this model.")
    try:
        return from_settings(held.method, held.settings)
    except KVRecallError as error:
        raise InputFileError(path, str(error).rstrip("."), _REMEDY) from None


def save_method(method: Method, path: str | Path, *, layers: int | None = None, about: dict[str, Any] | None = None) -> None:
    """Writes a method as JSON; `load_method` gives an equal one back. layers, about: see `MethodFile`."""
    held = MethodFile(method=name_of(method), settings=settings_of(method), layers=layers, about=about or {})
    Path(path).write_text(json.dumps(held.model_dump(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def from_settings(name: str, settings: dict[str, Any]) -> Method:
    """A method from plain values such as JSON has; types are checked strictly. Raises errors of `kvrecall.errors`."""
    chosen = method_class(name)
    known = [f.name for f in fields(chosen)]
    for key in settings:
        if key not in known:
            raise UnknownNameError(f"parameter of {name}", key, known)
    try:
        return TypeAdapter(chosen).validate_json(json.dumps(settings), strict=True)
    except ValidationError as error:
        raise InputFileError(f"settings of {name}", _first(error), "Types are those of the method's fields.") from None


def settings_of(method: Method) -> dict[str, Any]:
    """The fields that differ from their defaults, as values that JSON can hold."""
    changed = {f.name: getattr(method, f.name) for f in fields(method) if getattr(method, f.name) != f.default}
    layers = changed.pop("per_layer", ())
    plain = {name: _plain(value) for name, value in changed.items()}
    if layers:
        plain["per_layer"] = {str(number): {name: _plain(value) for name, value in values} for number, values in layers}
    return plain


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
        return tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except ValueError as error:  # both parsers name line and column
        raise InputFileError(path, f"is not {path.suffix[1:].upper()} ({error})", _REMEDY) from None


def _plain(value: Any) -> Any:
    if isinstance(value, Part):
        return str(value)
    if isinstance(value, (tuple, list)):
        return [_plain(each) for each in value]
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


def _first(error: ValidationError) -> str:
    """The first mistake: where it is, what was expected, what was given."""
    found = error.errors()[0]
    cause = found.get("ctx", {}).get("error")
    if isinstance(cause, KVRecallError):
        return str(cause).rstrip(".")
    where = ".".join(str(step) for step in found["loc"]) or "the file"
    return f"{where}: {found['msg'][:1].lower()}{found['msg'][1:]}, got {found['input']!r}"

"""Converts methods to plain values, as in JSON and on command lines, and back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass
from typing import Any, TypeVar

from kvrecall.core.errors import InputFileError, KVRecallError, ParameterError, UnknownNameError
from kvrecall.core.typed_fields import UNFORESEEN
from kvrecall.core.whole_files import first_mistake
from kvrecall.methods.base import Method
from kvrecall.methods.registry import method_class
from kvrecall.parts import Part

_TYPES = "Types are those of the method's fields."
_FORMER = {"rest": "estimate"}
"""Former names of settings -> their names. Users have texts, method files, vLLM configurations and saved sessions with them."""

T = TypeVar("T")


def current(settings: Mapping[str, T]) -> dict[str, T]:
    """The settings with their names in place of former names, in the same order. Raises ParameterError if both are given."""
    for former, name in _FORMER.items():
        if former in settings and name in settings:
            expected = f"the setting once, as {name} or by its former name {former}"
            raise ParameterError(name, expected, f"{name} and {former}", f"Remove {former}.")
    return {_FORMER.get(key, key): value for key, value in settings.items()}


def from_settings(name: str, settings: dict[str, Any]) -> Method:
    """A method from plain values; types are checked strictly. Former names of settings are accepted (`current`).

    Raises errors of `kvrecall.core.errors`.
    """
    from pydantic import TypeAdapter, ValidationError  # slow to import

    chosen, settings = method_class(name), current(settings)
    if isinstance(layers := settings.get("per_layer"), Mapping):
        settings["per_layer"] = {n: current(own) if isinstance(own, Mapping) else own for n, own in layers.items()}
    allowed = [f.name for f in fields(chosen)]
    for key in settings:
        if key not in allowed:
            raise UnknownNameError(f"parameter of {name}", key, allowed)
    try:
        return TypeAdapter(chosen).validate_json(
            json.dumps({key: _plain(value) for key, value in settings.items()}), strict=True
        )
    except ValidationError as error:
        cause = error.errors()[0].get("ctx", {}).get("error")
        if isinstance(cause, KVRecallError):
            raise cause from None  # the method's own check, with its own remedy
        raise InputFileError(f"settings of {name}", first_mistake(error), _TYPES) from None
    except KVRecallError:
        raise
    except UNFORESEEN as error:
        raise InputFileError(f"settings of {name}", f"a value of another type than its field's ({error})", _TYPES) from error


def settings_of(method: Method) -> dict[str, Any]:
    """The fields that differ from their defaults, as JSON-able values."""
    changed = {f.name: getattr(method, f.name) for f in fields(method) if getattr(method, f.name) != f.default}
    layers = changed.pop("per_layer", ())
    plain = {name: _plain(value) for name, value in changed.items()}
    if layers:
        plain["per_layer"] = {str(number): {name: _plain(value) for name, value in values} for number, values in layers}
    return plain


def _plain(value: Any) -> Any:
    if isinstance(value, Part):
        return str(value)
    if isinstance(value, (tuple, list)):
        return [_plain(each) for each in value]
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value

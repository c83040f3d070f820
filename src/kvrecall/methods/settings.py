"""Converts methods to plain values, as in JSON and on command lines, and back."""

from __future__ import annotations

import json
from dataclasses import asdict, fields, is_dataclass
from typing import Any

from kvrecall.core.errors import InputFileError, KVRecallError, UnknownNameError
from kvrecall.core.typed_fields import UNFORESEEN
from kvrecall.core.whole_files import first_mistake
from kvrecall.methods.base import Method
from kvrecall.methods.registry import method_class
from kvrecall.parts import Part

_TYPES = "Types are those of the method's fields."


def from_settings(name: str, settings: dict[str, Any]) -> Method:
    """A method from plain values; types are checked strictly. Raises errors of `kvrecall.core.errors`."""
    from pydantic import TypeAdapter, ValidationError  # slow to import

    chosen = method_class(name)
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

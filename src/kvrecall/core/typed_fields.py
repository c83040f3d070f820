"""Records whose values are checked against the types of their fields, before anything computes with them."""

from __future__ import annotations

from dataclasses import fields
from functools import cache
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from kvrecall.core.errors import ParameterError

_NAMES = {int: "an integer", float: "a number", bool: "True or False", str: "a text", NoneType: "None"}


class TypedFields:
    """Base of dataclasses that users make. Raises ParameterError for a value of another type than its field's, NaN included.

    An integer is a number, but True and False are neither. A list is as good as a tuple.
    """

    def __new__(cls, *values: Any, **named: Any) -> Any:
        hints = _hints(cls)
        given = dict(zip((field.name for field in fields(cls)), values, strict=False)) | named  # type: ignore[arg-type]
        for name, value in given.items():
            if name in hints and not _fits(value, hints[name]):
                raise ParameterError(name, _named(hints[name]), value, f"It is a parameter of {cls.__name__}.")
        return super().__new__(cls)


@cache
def _hints(cls: type) -> dict[str, Any]:
    try:
        return get_type_hints(cls)
    except NameError:  # a type that its module imports for type checkers alone
        return {}


def _fits(value: Any, hint: Any) -> bool:
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if origin in (Union, UnionType):
        return any(_fits(value, each) for each in inner)
    if origin is tuple:
        if not isinstance(value, tuple | list):
            return False
        each = [inner[0]] * len(value) if inner[-1] is Ellipsis else inner
        return len(each) == len(value) and all(map(_fits, value, each))
    if hint in (int, float) and isinstance(value, bool):
        return False
    if hint is float:
        return isinstance(value, int | float) and value == value
    return not isinstance(hint, type) or isinstance(value, hint)


def _named(hint: Any) -> str:
    inner = get_args(hint)
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(map(_named, inner))
    if get_origin(hint) is tuple:
        return f"a list of {_named(inner[0])}" if inner[-1] is Ellipsis else f"({', '.join(map(_named, inner))})"
    return _NAMES.get(hint, getattr(hint, "__name__", str(hint)))

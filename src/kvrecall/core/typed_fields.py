"""Records whose values have the types of their fields before anything computes with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import cache, wraps
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from kvrecall.core.errors import KVRecallError, ParameterError

_NAMES = {int: "an integer", float: "a number", bool: "True or False", str: "a text", NoneType: "None"}


UNFORESEEN = (TypeError, AttributeError, ArithmeticError, LookupError, ValueError)
"""Exceptions of a record's own checks for a value of an unexpected type, such as a list instead of a number."""


class TypedFields:
    """Base of dataclasses that users make. Raises ParameterError for a value of another type than its field's, NaN included,
    that the record's own checks let through or stumble over.

    An integer is a number, but True and False are neither. A list is as good as a tuple.
    """

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        if "__post_init__" in vars(cls):
            cls.__post_init__ = _with_types(cls.__post_init__)  # pyright: ignore[reportAttributeAccessIssue]

    def __post_init__(self) -> None:
        _check(self)

    def check_integers(self, remedy: str, *names: str, least: int = 1, most: int | None = None) -> None:
        """Raises ParameterError for fields of these names that are not integers from `least` on, up to `most`."""
        expected = f"an integer >= {least}" if most is None else f"an integer in {least} .. {most}"
        for name in names:
            value = getattr(self, name)
            if not isinstance(value, int) or value < least or (most is not None and value > most):
                raise ParameterError(name, expected, value, remedy)


def _with_types(check: Callable[[Any], None]) -> Callable[[Any], None]:
    @wraps(check)
    def checked(self: Any) -> None:
        try:
            check(self)
        except UNFORESEEN as error:
            if not isinstance(error, KVRecallError):
                _check(self)
            raise
        _check(self)

    return checked


def _check(record: Any) -> None:
    hints = _hints(type(record))
    for name in (field.name for field in fields(record)):
        if name in hints and not _fits(value := getattr(record, name), hints[name]):
            raise ParameterError(name, _named(hints[name]), value, f"It is a parameter of {type(record).__name__}.")


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

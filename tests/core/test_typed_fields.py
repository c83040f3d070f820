"""Values of another type than their field's are refused before anything computes with them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar

import pytest

import kvrecall
from kvrecall import methods, parts
from kvrecall.core.errors import KVRecallError, ParameterError
from kvrecall.core.typed_fields import TypedFields
from kvrecall.methods import registry


@dataclass(frozen=True)
class Record(TypedFields):
    shared: ClassVar[int] = 0
    count: int = 1
    share: float = 0.5
    named: str = "a"
    flag: bool = False
    most: int | None = None
    layers: tuple[int, ...] = ()
    step: tuple[int | None, float] = (None, 1.0)
    free: Any = None


@pytest.mark.parametrize(
    "given",
    [
        {"count": 3, "share": 2, "named": "", "flag": True, "most": 4, "layers": (1, 2), "step": (1, 2), "free": object()},
        {"layers": [1, 2], "most": None, "share": float("inf"), "step": [None, 0.5]},
    ],
)
def test_values_of_the_right_type(given: dict[str, Any]) -> None:
    assert all(getattr(Record(**given), name) is value for name, value in given.items())
    assert Record(3, 0.5, "b") == Record(count=3, share=0.5, named="b")


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("count", True, "an integer"), ("count", 1.0, "an integer"), ("count", "1", "an integer"),
        ("count", None, "an integer"),
        ("share", "0.5", "a number"), ("share", float("nan"), "a number"), ("share", False, "a number"),
        ("named", b"a", "a text"), ("flag", 1, "True or False"), ("flag", "no", "True or False"),
        ("most", "4", "an integer or None"), ("layers", 3, "a list of an integer"),
        ("layers", [1, "2"], "a list of an integer"),
        ("layers", "12", "a list of an integer"), ("step", (1, 2, 3), r"\(an integer or None, a number\)"),
    ],
)  # fmt: skip
def test_values_of_another_type(name: str, value: Any, expected: str) -> None:
    with pytest.raises(ParameterError, match=rf"{name}: expected {expected}, got .*It is a parameter of Record"):
        Record(**{name: value})


ODD = ("x", -1, 1.5, None, [], {}, True, float("nan"), 10**30, object(), [None], "pages:page_tokens=x")


@pytest.mark.parametrize("name", [*registry.names(), "method"])
def test_no_value_of_a_method_ends_in_an_error_of_the_internals(name: str) -> None:
    for field in fields(registry.method_class(name)):
        for value in ODD:
            try:
                methods.get(name, **{field.name: value})
            except KVRecallError:
                continue


@pytest.mark.parametrize("role", parts.ROLES)
def test_no_value_of_a_part_ends_in_an_error_of_the_internals(role: str) -> None:
    for name in parts.names(role):
        kind = parts.part_class(role, name)
        for field in fields(kind):
            for value in ODD:
                try:
                    kind(**{field.name: value})
                except KVRecallError:
                    continue


def test_layers_are_counted_from_the_first() -> None:
    assert kvrecall.Exact(dense_layers=[0, 2]) == kvrecall.Exact(dense_layers=(0, 2))  # type: ignore[arg-type]
    with pytest.raises(ParameterError, match="dense_layers: expected numbers of layers, from 0 on"):
        kvrecall.Exact(dense_layers=(-1,))


@pytest.mark.parametrize("given", [None, 3, ["pariskv"], b"pariskv"])
def test_a_method_is_named_by_a_text(given: Any) -> None:
    for named in (methods.get, methods.parse):
        with pytest.raises(KVRecallError, match="pariskv"):
            named(given)

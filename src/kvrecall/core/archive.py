"""The state of a layer, saved and loaded by the same lines of code.

Each part of a layer has one method `archive` for its state. Each line names a number or a tensor and gives its current value
and its conditions. While saving, the line notes the value and returns it. While loading, it returns the value of the file.
Files are not trusted, so the conditions are checked:

    self._counts[b] = archive.integer("count", self._counts[b], most=zone)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from math import isfinite
from typing import Any, NoReturn

import torch
from torch import Tensor

from kvrecall.core.errors import SessionError
from kvrecall.core.structs import lasting_tensors

MOST = 2**48
"""Upper bound of all numbers of tokens, blocks and bytes."""
Dtypes = torch.dtype | tuple[torch.dtype, ...]
Shape = tuple[int | None, ...]
Value = bool | int | float | None | list[int]


class Notes:
    """The content of an archive. tensors: by name. memories: of blocks, with tokens of each sequence."""

    def __init__(self, values: dict[str, Value] | None = None) -> None:
        self.values: dict[str, Value] = values or {}
        self.tensors: dict[str, Tensor] = {}
        self.memories: dict[str, tuple[Any, list[int]]] = {}


class Archive:
    """Saves into `notes`, without copying tensors, or loads from them."""

    def __init__(self, device: torch.device, loaded: Notes | None = None) -> None:
        """device: of loaded tensors. loaded: the content of a file; None: saves."""
        self.device, self.saving, self.notes, self._prefix = device, loaded is None, loaded or Notes(), ""

    def knows(self, name: str) -> bool:
        """Whether it has a value of that name, which files of older releases may lack."""
        return self.saving or self._prefix + name in self.notes.values

    def under(self, name: str) -> Archive:
        """The same archive with the prefix `name`."""
        other = copy(self)
        other._prefix = f"{self._prefix}{name}."
        return other

    def blocks(self, name: str, memory: Any, tokens: list[int]) -> None:
        """Notes the memory of a layer's blocks (`cache.block_rows`) with the first `tokens` tokens of each sequence, to save or
        to fill."""
        self.notes.memories[self._prefix + name] = memory, list(tokens)

    def done(self) -> None:
        """Raises SessionError for entries that were not loaded."""
        for name in [*self.notes.values, *self.notes.tensors]:
            self.refuse(name, "nothing of that name", "something")

    def each(self, name: str, count: int) -> Iterator[tuple[int, Archive]]:
        """(i, archive with the prefix `name` and i) for i below `count`."""
        return ((number, self.under(f"{name}.{number}")) for number in range(count))

    def integer(self, name: str, value: int, least: int = 0, most: int = MOST) -> int:
        """An integer in least .. most."""
        number = self._entry(self.notes.values, name, value)
        if type(number) is not int or not least <= number <= most:
            self.refuse(name, f"a whole number in {least:,} .. {most:,}", number)
        return number

    def integers(
        self, name: str, values: Sequence[int], least: int = 0, most: int = MOST, count: int | None = None
    ) -> list[int]:
        """Integers in least .. most; `count` of them, None: any number."""
        numbers = self._entry(self.notes.values, name, list(values))
        if not isinstance(numbers, list) or any(type(x) is not int or not least <= x <= most for x in numbers):
            self.refuse(name, f"whole numbers in {least:,} .. {most:,}", numbers)
        if count is not None and len(numbers) != count:
            self.refuse(name, f"{count:,} numbers", len(numbers))
        return list(numbers)

    def number(self, name: str, value: float) -> float:
        """A finite number."""
        number = self._entry(self.notes.values, name, float(value))
        if type(number) not in (int, float) or not isfinite(number):
            self.refuse(name, "a finite number", number)
        return float(number)

    def flag(self, name: str, value: bool) -> bool:
        """True or False."""
        flag = self._entry(self.notes.values, name, bool(value))
        if type(flag) is not bool:
            self.refuse(name, "true or false", flag)
        return flag

    def has(self, name: str, value: object) -> bool:
        """Whether a value of that name exists; `value` is not None."""
        return self.flag(f"{name}?", value is not None)

    def tensor(
        self, name: str, value: Tensor | None, shape: Shape, dtype: Dtypes, least: int | None = None, below: int | None = None,
        ascending: bool = False, finite: bool = True,
    ) -> Tensor:  # fmt: skip
        """A tensor. shape: None for any size. least, below: range of its numbers. ascending: strictly, in the last dimension.
        finite: False for logarithms, which may be infinite."""
        assert value is not None or not self.saving, name
        with lasting_tensors():
            tensor = self._entry(self.notes.tensors, name, value, "a tensor")
            tensor = tensor if self.saving else tensor.to(self.device)
        dtypes = dtype if isinstance(dtype, tuple) else (dtype,)
        fits = len(shape) == tensor.ndim and all(want in (None, have) for want, have in zip(shape, tensor.shape, strict=False))
        if not fits or tensor.dtype not in dtypes:
            wanted = " or ".join(str(x).removeprefix("torch.") for x in dtypes)
            sizes = ", ".join("any" if x is None else f"{x:,}" for x in shape)
            self.refuse(name, f"{wanted} [{sizes}]", f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}")
        if self.saving or not tensor.numel():
            return tensor
        if tensor.is_floating_point() and not bool((tensor.isfinite() if finite else ~tensor.isnan()).all()):
            self.refuse(name, "finite numbers" if finite else "no NaN", "others")
        if (least is not None and bool((tensor < least).any())) or (below is not None and bool((tensor >= below).any())):
            self.refuse(name, f"numbers from {least} to below {below}", "others")
        if ascending and bool((tensor[..., 1:] <= tensor[..., :-1]).any()):
            self.refuse(name, "ascending numbers", "others")
        return tensor

    def optional(self, name: str, value: Tensor | None, shape: Shape, dtype: Dtypes, **more: Any) -> Tensor | None:
        """As `tensor`, or None."""
        return self.tensor(name, value, shape, dtype, **more) if self.has(name, value) else None

    def refuse(self, name: str, expected: str, got: object) -> NoReturn:
        """Raises SessionError."""
        said = repr(got)
        raise SessionError(self._prefix + name, expected, said if len(said) < 80 else said[:77] + "...")

    def _entry(self, entries: dict[str, Any], name: str, entry: Any, kind: str = "a value") -> Any:
        """Adds an entry and returns it, or returns the loaded one, once. kind: what is missing, for the error."""
        path = self._prefix + name
        if self.saving:
            assert path not in entries, name
            entries[path] = entry
            return entry
        if path not in entries:
            self.refuse(name, kind, "none")
        return entries.pop(path)

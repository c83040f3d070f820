"""State of several sequences, with what a decode step is undone by and what a fork copies."""

from __future__ import annotations

from copy import copy
from typing import Any, ClassVar, Self


class PerSequence:
    """Lists with one entry per sequence. Entries are never written to, only replaced, so copies of a sequence share them."""

    of_sequence: ClassVar[tuple[str, ...]] = ()
    """Names of the lists."""

    def mark(self, sequence: int, prompt: bool = False) -> Any:
        """State of a sequence before a decode step, for `rewind`. Later steps do not change it. prompt: the step ends a
        prompt."""
        return tuple(getattr(self, name)[sequence] for name in self.of_sequence)

    def rewind(self, sequence: int, mark: Any) -> None:
        """Restores a sequence to its state at `mark`."""
        for name, entry in zip(self.of_sequence, mark, strict=True):
            getattr(self, name)[sequence] = entry

    def select(self, sequences: list[int]) -> Self:
        """A copy whose sequence i is this one's `sequences[i]`."""
        chosen = copy(self)
        for name in self.of_sequence:
            setattr(chosen, name, [getattr(self, name)[b] for b in sequences])
        return chosen

"""An index around another index, which it calls for everything that it does not change. Used by pruning and page means."""

from __future__ import annotations

from abc import ABC, abstractmethod, update_abstractmethods
from collections.abc import Callable, Sequence
from functools import wraps
from operator import attrgetter
from typing import Any, ClassVar, Self

from torch import Tensor

from kvrecall.core.archive import Archive
from kvrecall.core.per_sequence import PerSequence
from kvrecall.core.structs import Budget, Selection
from kvrecall.index.base import Index, LayerShape, RowSource
from kvrecall.index.table import TokenTable
from kvrecall.parts import Part


class Pruning(Part, ABC):
    """Base of the hyper-parameters of a pruning method, which keeps part of each selection; a frozen dataclass."""

    role: ClassVar[str] = "prune"

    @abstractmethod
    def build(self, index: Index, shape: LayerShape, gqa: str) -> Index:
        """Wraps the index of one layer and prunes its selections. gqa: how the heads of a group share its search."""

    @abstractmethod
    def nbytes(self, shape: LayerShape, tokens: int) -> int:
        """Device bytes that pruning adds for one sequence with `tokens` tokens in its retrieval zone."""


def _forwarding(cls: type[IndexWrapper]) -> type[IndexWrapper]:
    """Gives a wrapper every method and property of `Index` that it does not define: that of its base."""

    def forward(name: str) -> Any:
        def call(self: IndexWrapper, *args: Any, **kwargs: Any) -> Any:
            return getattr(self.base, name)(*args, **kwargs)

        return wraps(getattr(Index, name), updated=())(call)

    for name in {*vars(Index), *Index.__annotations__} - {*vars(cls), "slot_step"}:
        if not name.startswith("_"):
            is_method = callable(getattr(Index, name, None))
            setattr(cls, name, forward(name) if is_method else property(attrgetter(f"base.{name}")))
    return update_abstractmethods(cls)


@_forwarding
class IndexWrapper(PerSequence, Index):
    """Passes everything on to `base`, but for device steps; a subclass may keep its own tables and lists, and change selections
    in `finish`."""

    def __init__(self, base: Index, *tables: TokenTable) -> None:
        self.base, self.tables = base, tables
        """The inner index, and tables that are copied with it."""

    @property
    def nbytes(self) -> int:
        return self.base.nbytes + sum(table.nbytes for table in self.tables)

    def append(self, sequence: int, keys: Tensor) -> None:
        self.base.append(sequence, keys)

    def bind(self, sources: Sequence[RowSource]) -> None:
        super().bind(sources)
        for part in (self.base, *self.tables):
            part.bind(sources)

    def mark(self, sequence: int, prompt: bool = False) -> Any:
        return self.base.mark(sequence, prompt), [*(table.lengths[sequence] for table in self.tables), *super().mark(sequence)]

    def rewind(self, sequence: int, mark: Any) -> None:
        base, own = mark
        self.base.rewind(sequence, base)
        for table, tokens in zip(self.tables, own, strict=False):
            table.truncate(sequence, tokens)
        super().rewind(sequence, own[len(self.tables) :])

    def archive(self, archive: Archive, tokens: list[int]) -> None:
        self.base.archive(archive.under("base"), tokens)
        for number, table in enumerate(self.tables):
            table.archive(archive, f"table.{number}", tokens)

    def select(self, sequences: list[int]) -> Self:
        chosen = super().select(sequences)
        chosen.base = self.base.select(sequences)
        chosen.tables = tuple(table.select(sequences) for table in self.tables)
        return chosen

    def search(self, queries: Tensor, budget: Budget, sequences: list[int]) -> Selection:
        return self.finish(self.base.search(queries, budget, sequences), queries, budget, sequences)

    def start_search(self, queries: Tensor, budget: Budget, sequences: list[int]) -> Callable[[], Selection]:
        end = self.base.start_search(queries, budget, sequences)
        return lambda: self.finish(end(), queries, budget, sequences)

    def finish(self, selection: Selection, queries: Tensor, budget: Budget, sequences: list[int]) -> Selection:
        """What a search returns, from what that of `base` has found, on the device or the CPU. The rest as for `search`."""
        return selection

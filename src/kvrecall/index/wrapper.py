"""An index around another index, which it calls for everything that it does not change. Used by pruning and page means."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import copy
from typing import Any, ClassVar, Self

from torch import Tensor

from kvrecall.cache.slot_zones import ZonePlan
from kvrecall.cache.zones import ZoneSizes
from kvrecall.core.archive import Archive
from kvrecall.core.pieces import Work
from kvrecall.core.structs import Budget, Selection
from kvrecall.index.base import Index, LayerShape, RowSource
from kvrecall.index.table import TokenTable
from kvrecall.parts import Part
from kvrecall.select.queries import ObservedQueries


class Pruning(Part, ABC):
    """Base of the hyper-parameters of a pruning method, which keeps part of each selection; a frozen dataclass."""

    role: ClassVar[str] = "prune"

    @abstractmethod
    def build(self, index: Index, shape: LayerShape, gqa: str) -> Index:
        """Wraps the index of one layer and prunes its selections. gqa: how the heads of a group share its search."""

    @abstractmethod
    def nbytes(self, shape: LayerShape, tokens: int) -> int:
        """Device bytes that pruning adds for one sequence with `tokens` tokens in its retrieval zone."""


class IndexWrapper(Index):
    """Passes everything on to `base`; a subclass may keep its own tables."""

    def __init__(self, base: Index, *tables: TokenTable) -> None:
        self.base, self.tables = base, tables
        """The inner index, and tables that are copied with it."""

    @property
    def lengths(self) -> list[int]:  # type: ignore[override]
        return self.base.lengths

    @property
    def nbytes(self) -> int:
        return self.base.nbytes + sum(table.nbytes for table in self.tables)

    def take_rows(self, sequence: int, rows: Tensor) -> None:
        self.base.take_rows(sequence, rows)

    def append(self, sequence: int, keys: Tensor) -> None:
        self.base.append(sequence, keys)

    def append_generated(self, sequence: int, keys: Tensor) -> None:
        self.base.append_generated(sequence, keys)

    def bind(self, sources: Sequence[RowSource]) -> None:
        for part in (self.base, *self.tables):
            part.bind(sources)

    def end_of_prompt(self, sequence: int, observed: ObservedQueries | None, offset: int) -> None:
        self.base.end_of_prompt(sequence, observed, offset)

    def mark_prompt(self, sequence: int, begin: int, end: int) -> None:
        self.base.mark_prompt(sequence, begin, end)

    def exclude(self, sequence: int, ids: Tensor | None) -> None:
        self.base.exclude(sequence, ids)

    def restructured(self, ids: Tensor | None, keys: Tensor) -> Work[Any]:
        return self.base.restructured(ids, keys)

    def restructure(self, sequence: int, ids: Tensor | None, made: Any) -> None:
        self.base.restructure(sequence, ids, made)

    @property
    def watches(self) -> bool:  # type: ignore[override]
        return self.base.watches

    def watch(
        self, sequence: int, observed: ObservedQueries, resident: list[tuple[Tensor, int]], offset: int, scaling: float,
        attended: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.base.watch(sequence, observed, resident, offset, scaling, attended)

    def learn(self, sequences: list[int]) -> None:
        self.base.learn(sequences)

    def reserve(self, tokens: int) -> None:
        self.base.reserve(tokens)

    def truncate(self, sequence: int, tokens: int) -> None:
        self.base.truncate(sequence, tokens)

    def mark(self, sequence: int, prompt: bool) -> Any:
        return self.base.mark(sequence, prompt), [table.lengths[sequence] for table in self.tables]

    def rewind(self, sequence: int, mark: Any) -> None:
        base, lengths = mark
        self.base.rewind(sequence, base)
        for table, tokens in zip(self.tables, lengths, strict=True):
            table.truncate(sequence, tokens)

    def archive(self, archive: Archive, tokens: list[int]) -> None:
        self.base.archive(archive.under("base"), tokens)
        for number, table in enumerate(self.tables):
            table.archive(archive, f"table.{number}", tokens)

    def select(self, sequences: list[int]) -> Self:
        chosen = copy(self)
        chosen.base = self.base.select(sequences)
        chosen.tables = tuple(table.select(sequences) for table in self.tables)
        return chosen

    def candidates(self, queries: Tensor, budget: Budget, sequences: list[int]) -> list[Tensor] | None:
        return self.base.candidates(queries, budget, sequences)

    def prepare(self, sequences: list[int]) -> None:
        self.base.prepare(sequences)

    def search(self, queries: Tensor, budget: Budget, sequences: list[int]) -> Selection:
        return self.base.search(queries, budget, sequences)

    def slot_plan(self, sizes: ZoneSizes, top_k: int, slots: int) -> ZonePlan | None:
        return self.base.slot_plan(sizes, top_k, slots)

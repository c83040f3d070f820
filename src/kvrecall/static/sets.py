"""The static sets of one layer: their schedule, and their refresh, whose work is spread over several steps.

A set is chosen by the queries and the zone of `lead` steps before it is due. The share of work of a step depends only on the
number of steps left, so captured steps, uncaptured steps and any mix of them choose the same set.

On a GPU the work runs on a stream of its own, beside the decode steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from kvrecall.cache.copies import read_keys
from kvrecall.cache.zone_rows import ZoneRows
from kvrecall.core.archive import Archive
from kvrecall.core.per_sequence import PerSequence
from kvrecall.core.pieces import Work, chunks
from kvrecall.core.structs import Rows, lasting_tensors, stack_rows
from kvrecall.fetch import rows_at
from kvrecall.index.base import Index, LayerShape
from kvrecall.select.queries import archive_observed
from kvrecall.static.choice import LOOKED, WEIGHED, Observation, StaticChoice, StaticSet, first_age


@dataclass(frozen=True)
class Chosen:
    """Result of a refresh. ids int32 `[H_kv, m]`; rows `[H_kv, m, 2, D]`; pages: what the index made for these ids."""

    ids: Tensor
    rows: Tensor
    pages: Any


class StaticRefresh:
    """A static set in the making, chosen by the observation that it was created with.

    Keys come from the host once, into device memory of their own, `[H_kv, n, D]`, until all is done. Its kernels and copies
    wait for the current stream's work at the time of `advance`; the current stream waits for them in `put`.
    """

    def __init__(
        self, config: StaticChoice, sight: Observation, tokens: int, shape: LayerShape, source: ZoneRows, index: Index
    ) -> None:
        """tokens: length of the zone now. source: its rows; more may come. Nothing of `sight` may be written to."""
        self._config, self._sight, self._tokens, self._shape = config, sight, tokens, shape
        self._source, self._index = source, index
        self._begin()

    def advance(self, share: float) -> None:
        """Works until at least this share is done; 1: until `chosen` is set. After an error the work starts again."""
        if not self._lacks(share):
            return
        with self._beside():
            while self._lacks(share):
                try:
                    self._spent += next(self._work)
                except StopIteration as end:
                    self.chosen = end.value
                except BaseException:
                    self._begin()
                    raise

    def put(self, sequence: int) -> Chosen:
        """Excludes the chosen tokens from the index and returns them."""
        chosen = self.chosen
        assert chosen is not None
        if self._done is not None:
            torch.cuda.current_stream(self._shape.device).wait_event(self._done)
        self._index.restructure(sequence, chosen.ids if chosen.ids.shape[1] else None, chosen.pages)
        return chosen

    @property
    def nbytes(self) -> int:
        """Device bytes of the zone's keys."""
        shape, tokens = self._shape, self._tokens if self._spent and self.chosen is None else 0
        return shape.kv_heads * tokens * shape.head_dim * shape.dtype.itemsize

    def pause(self) -> None:
        """Frees its memory. The work starts again on the next call."""
        if self.chosen is None:
            self._begin()

    def again(self, source: ZoneRows, index: Index) -> StaticRefresh:
        """A refresh for a copy of the sequence. Unfinished work starts again, because memory being written is not shared."""
        other = StaticRefresh(self._config, self._sight, self._tokens, self._shape, source, index)
        other.chosen = self.chosen
        return other

    @staticmethod
    def archived(
        archive: Archive, refresh: StaticRefresh | None, config: StaticChoice, shape: LayerShape, source: ZoneRows, index: Index
    ) -> StaticRefresh:
        """Saves a refresh, or loads one, which starts its work again and has the same result."""
        sight = refresh._sight if refresh else Observation(None, [], 0, 1, 1.0)
        observed = archive_observed(archive, sight.observed, (shape.query_heads, shape.head_dim))
        tokens = archive.integer("tokens", refresh._tokens if refresh else 0, most=source.length)
        others: list[tuple[Tensor, int]] = []
        for number, part in archive.each("others", archive.integer("parts", len(sight.others), most=8)):
            keys, at = sight.others[number] if refresh else (None, 0)
            keys = part.tensor("keys", keys, (shape.kv_heads, None, shape.head_dim), shape.dtype)
            others.append((keys, part.integer("position", at)))
        offset, top_k = archive.integer("offset", sight.offset), archive.integer("top_k", sight.top_k, least=1)
        scaling = archive.number("scaling", sight.scaling)
        count = archive.integer("wanted", sight.count or 0, most=tokens) if archive.has("wanted", sight.count) else None
        if observed is None and config.observed_queries:
            archive.refuse("observed", "queries that judge", "none")
        if refresh is not None:
            return refresh
        return StaticRefresh(config, Observation(observed, others, offset, top_k, scaling, count), tokens, shape, source, index)

    def _lacks(self, share: float) -> bool:
        return self.chosen is None and (share >= 1 or self._spent < share * self._tokens * (LOOKED + WEIGHED + 1))

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """On a GPU: makes the stream of refreshes the current one, behind what the current stream was given so far: the
        observation, and readers of memory that has been freed and is used here again."""
        device = self._shape.device
        if device.type != "cuda":
            yield
            return
        stream, observed = _stream(device), self._sight.observed
        stream.wait_stream(torch.cuda.current_stream(device))
        for read in (*(keys for keys, _ in self._sight.others), *((observed.queries, observed.lse) if observed else ())):
            read.record_stream(stream)  # the refresh may be dropped before its kernels have run
        with torch.cuda.stream(stream):
            yield
            self._done = torch.cuda.Event()
            self._done.record()

    def _begin(self) -> None:
        self.chosen: Chosen | None = None
        self._done: torch.cuda.Event | None = None
        self._work = _choosing(self._config, self._sight, self._tokens, self._shape, self._source, self._index)
        self._spent = 0


def _choosing(
    config: StaticChoice, sight: Observation, tokens: int, shape: LayerShape, source: ZoneRows, index: Index
) -> Work[Chosen]:
    """All of a refresh. A free function, so that dropping the object frees its memory at once (no reference cycle)."""
    with lasting_tensors():  # steps in between may write to it in another mode
        zone = torch.empty(shape.kv_heads, tokens, shape.head_dim, dtype=shape.dtype, device=shape.device)
    ids = yield from config.choosing(sight, zone, _arrivals(source, zone))
    pages = yield from index.restructured(ids if ids.shape[1] else None, zone)
    return Chosen(ids, rows_at(ids, source, shape.device), pages)


def _arrivals(source: ZoneRows, zone: Tensor) -> Iterator[slice]:
    for part in chunks(zone.shape[1], zone.device):
        read_keys(source, part.start, zone[:, part])
        yield part


class StaticSets(PerSequence):
    """The static set of every sequence of a layer, and the running refreshes. After a `rewind`, which leaves the index as it
    is, a running refresh may have progressed; its result is the same."""

    of_sequence = ("sets", "_counts", "_refreshes")

    def __init__(self, config: StaticChoice | None, sequences: int, period: int = 1) -> None:
        """period: tokens leave the window every so many steps."""
        self.config, self._period = config, period
        self.sets: list[StaticSet | None] = [None] * sequences
        self._counts: list[int | None] = [None] * sequences  # as measured at the end of the prompt
        self._refreshes: list[StaticRefresh | None] = [None] * sequences

    def due(self, sequence: int, steps: int = 1) -> int | None:
        """In how many steps the set of a sequence is due, if part of the work belongs before the step that is the `steps`-th
        since ages were counted; 0: now. None: there is nothing to do."""
        before, config = self.sets[sequence], self.config
        if config is None or (before is not None and config.interval is None):
            return None
        if before is None or config.interval is None:
            return 0
        left = max(0, config.interval - before.age - steps)
        return left if left <= config.lead else None

    def count(self, sequence: int) -> int | None:
        """How many tokens the sets of a sequence have, once that is known."""
        return self._counts[sequence]

    def tokens(self, sequence: int) -> int:
        """Tokens of the present set of a sequence."""
        chosen = self.sets[sequence]
        return 0 if chosen is None else chosen.ids.shape[1]

    def begin_step(self, sequence: int, layer: int, look: Callable[[], StaticRefresh | None]) -> bool:
        """Does the work due before the next step of a sequence. Returns whether there is a new set; otherwise the present set
        ages by one step. layer: layer number, which sets the starting age. look: see `work`."""
        left = self.due(sequence)
        if left is not None and self.work(sequence, left, look):
            refresh, config, first = self._refreshes[sequence], self.config, self.sets[sequence] is None
            assert refresh is not None and config is not None
            chosen = refresh.put(sequence)
            age = first_age(layer, config.interval, config.lead, self._period) if first else 0
            self.sets[sequence] = StaticSet(chosen.ids, chosen.rows, age)
            self._counts[sequence], self._refreshes[sequence] = chosen.ids.shape[1], None
            return True
        if left != 0:
            self.grow_older(sequence, 1)
        return False

    def work(self, sequence: int, left: int, look: Callable[[], StaticRefresh | None]) -> bool:
        """Does the work due `left` steps before a set is due. `look` starts a refresh if none is running, or returns None
        without queries. Returns whether a set is due and done. A second call changes nothing."""
        refresh = self._refreshes[sequence] = self._refreshes[sequence] or look()
        if refresh is None:
            return False
        lead = self.config.lead if self.config else 0
        refresh.advance((lead - left + 1) / lead if left else 1.0)
        return not left

    def grow_older(self, sequence: int, steps: int) -> None:
        """Counts decode steps."""
        chosen = self.sets[sequence]
        self.sets[sequence] = None if chosen is None else replace(chosen, age=chosen.age + steps)

    def rows(self, sequences: list[int], shape: LayerShape) -> Rows:
        """The rows of several sequences as one batch."""
        nothing = torch.empty(shape.kv_heads, 0, 2, shape.head_dim, dtype=shape.dtype, device=shape.device)
        rows = [nothing if (chosen := self.sets[b]) is None else chosen.rows for b in sequences]
        counts = [torch.full((r.shape[0],), r.shape[1], dtype=torch.int32, device=r.device) for r in rows]
        return stack_rows(list(zip(rows, counts, strict=True)))

    @property
    def nbytes(self) -> int:
        """Bytes on the device of the sets and of running refreshes."""
        sets = sum(chosen.rows.nbytes + chosen.ids.nbytes for chosen in self.sets if chosen is not None)
        return sets + sum(refresh.nbytes for refresh in self._refreshes if refresh is not None)

    def pause(self) -> None:
        """Frees memory that only a running refresh needs."""
        for refresh in self._refreshes:
            if refresh is not None:
                refresh.pause()

    def drop(self, sequence: int) -> None:
        """Drops the refresh of a sequence: a new prompt has begun."""
        self._refreshes[sequence] = None

    def forget(self, sequence: int, count: bool = False) -> None:
        """Chooses the set of a sequence again at the next step. count: measures its size again, too."""
        self.sets[sequence] = self._refreshes[sequence] = None
        if count:
            self._counts[sequence] = None

    def fork(self, sequences: list[int], sources: list[ZoneRows], index: Index | None) -> StaticSets:
        """The sets of copies of some sequences, with their rows and their index. Running refreshes start again there."""
        chosen = self.select(sequences)
        running = zip(chosen._refreshes, sources, strict=True)
        chosen._refreshes = [None if index is None else refresh and refresh.again(source, index) for refresh, source in running]
        return chosen

    def archive(self, archive: Archive, shape: LayerShape, sources: list[ZoneRows], index: Index | None) -> None:
        """Saves or loads the sets of every sequence; see `core.archive`. A loaded refresh starts its work again."""
        heads, dim = shape.kv_heads, shape.head_dim
        for b, part in archive.each("static", len(self.sets)):
            chosen, tokens = self.sets[b], sources[b].length
            count = self._counts[b]
            if part.has("count", count):
                self._counts[b] = part.integer("count", count or 0, most=tokens)
            if part.has("set", chosen):
                own, size = chosen and chosen.ids, (heads, None)
                ids = part.tensor("ids", own, size, torch.int32, least=0, below=tokens, ascending=True)
                rows = part.tensor("rows", chosen and chosen.rows, (heads, ids.shape[1], 2, dim), shape.dtype)
                least = -1 if self.config is None else -1 - self.config.lead - (self.config.interval or 0)
                self.sets[b] = StaticSet(ids, rows, part.integer("age", chosen.age if chosen else 0, least=least))
            refresh = self._refreshes[b]
            if part.has("refresh", refresh):
                if self.config is None or index is None:
                    part.refuse("refresh?", "false without an index and a static set", True)
                restored = StaticRefresh.archived(part.under("refresh"), refresh, self.config, shape, sources[b], index)
                self._refreshes[b] = restored


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)

"""What a layer was before a change, and the way back: after an error, an interrupt, or a crop to a token of the last call.

**A change is complete or undone.** `begin` marks the layer before anything changes, and `commit` removes the mark, by one
assignment, when everything is done. After an error, `undo` goes back to the mark: rows and lengths exactly. The index is cut
back if it is whole, else it is rebuilt from the rows. An error can strike where no handler catches it: an exception set by
another thread, or a second one during handling. The mark then stays, and the next user of the layer goes back to it first
(`mend`).

**Decode steps of one call are taken back exactly**, so that rejected guesses leave nothing behind. A call of several steps
records, before each one, what the step will change (`LastSteps`). A crop to one of these tokens takes back the steps after it,
the last one first: rows, zones, index, trigger, static set, held selection and logs are as they were. Any other change of the
layer drops the records. A crop then drops conclusions instead: the trigger fires at the next step and the static set is chosen
again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kvrecall.cache.layer import LayerStore, StoreMark
from kvrecall.core.structs import HeldSelection
from kvrecall.fetch import Fetched
from kvrecall.index.base import Index, LayerShape
from kvrecall.methods.base import Method
from kvrecall.select.queries import QueryLog
from kvrecall.static.sets import StaticSets
from kvrecall.trigger import Trigger
from kvrecall.trigger.segments import SegmentLog


@dataclass(frozen=True)
class Mark:
    """State of a layer beside its store. rewind: restores the counters of the layer's owner."""

    prompt_from: list[int | None]
    seen: list[Any]
    rewind: Callable[[], None]


class Reversible(ABC):
    """The parts of a layer's state that a change is taken back from."""

    shape: LayerShape
    method: Method
    store: LayerStore
    index: Index | None
    trigger: Trigger
    statics: StaticSets
    log: QueryLog | None
    segments: SegmentLog | None
    held: dict[int, HeldSelection]
    fetched: dict[int, Fetched]
    prompt_from: list[int | None]

    def __init__(self) -> None:
        self.incomplete = False
        """Whether an error has struck while tables of the index were written."""
        self.mark: Mark | None = None
        """While the layer is changed, what to go back to."""
        self.last_steps = LastSteps()
        """The decode steps of the last call, as far as a crop can undo them."""

    @contextmanager
    def building_index(self) -> Iterator[None]:
        """Marks the layer as incomplete while an error inside is not undone."""
        before, self.incomplete = self.incomplete, True
        yield
        self.incomplete = before

    @abstractmethod
    def forget(self, sequence: int) -> None:
        """Drops what was concluded from removed tokens. The index is truncated elsewhere."""

    @abstractmethod
    def reindex(self) -> None:
        """Fills an empty index from the rows of the retrieval zone and the remembered queries."""


@contextmanager
def all_of_it(state: Reversible, rewind: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Makes the changes inside atomic. A nested block does nothing more."""
    if state.mark is not None:
        yield
        return
    begin(state, rewind)
    try:
        yield
    except BaseException:
        undo(state)
        raise
    commit(state)


def begin(state: Reversible, rewind: Callable[[], None]) -> None:
    """Marks the layer's present state, after making its index whole."""
    if state.incomplete:
        _renew_index(state)
    state.store.mark()
    seen = [] if state.log is None else [state.log.mark(b) for b in range(state.store.sequences)]
    state.mark = Mark(list(state.prompt_from), seen, rewind)


def commit(state: Reversible) -> None:
    """Ends the change: everything is done."""
    state.mark = None
    state.store.keep()


def mend(state: Reversible) -> bool:
    """Undoes an unfinished change. Returns whether there was one."""
    if state.mark is not None:
        undo(state)
        return True
    if state.incomplete:
        _renew_index(state)
    return False


def undo(state: Reversible) -> None:
    """Goes back to the mark. Can be called again after an error inside it, for example refused memory for a new index."""
    mark = state.mark
    assert mark is not None
    state.last_steps.forget()
    state.store.restore()
    mark.rewind()
    state.prompt_from = [None if now is None else then for now, then in zip(state.prompt_from, mark.prompt_from, strict=True)]
    for b in range(state.store.sequences):
        if state.log is not None:
            state.log.rewind(b, mark.seen[b])
        state.forget(b)
    _undo_index(state)
    commit(state)


def _undo_index(state: Reversible) -> None:
    """Cuts the index back to the retrieval zone. Rebuilds it if it may be incomplete or lacks tokens."""
    if state.index is None:
        return
    known, stored = list(state.index.lengths), [pool.length for pool in state.store.host]
    if state.incomplete or any(own < held for own, held in zip(known, stored, strict=True)):
        _renew_index(state)
        return
    with state.building_index():
        for b, (own, held) in enumerate(zip(known, stored, strict=True)):
            if own > held:
                state.index.truncate(b, held)
            if state.statics.config is not None:
                state.index.exclude(b, None)


def _renew_index(state: Reversible) -> None:
    """Rebuilds the index: its tables may hold anything, but all rows are there. Static sets are chosen again, too."""
    state.incomplete = True  # until the new index is whole
    state.last_steps.forget()
    state.index = index = state.method.build_index(state.shape)
    assert index is not None
    index.bind(state.store.host)
    state.prompt_from = [0] * state.store.sequences
    for b in range(state.store.sequences):
        state.forget(b)
    state.reindex()
    state.incomplete = False


@dataclass(frozen=True)
class Before:
    """State of one sequence before one step. tokens: its length. Marks are those of each part, for its `rewind`."""

    tokens: int
    prompt_from: int | None
    index: Any
    trigger: Any
    static: Any
    segments: Any
    seen: Any
    held: HeldSelection | None

    @staticmethod
    def of(state: Reversible, b: int) -> Before:
        begun = state.prompt_from[b]
        return Before(
            tokens=state.store.zones(b).total,
            prompt_from=begun,
            index=None if state.index is None else state.index.mark(b, begun not in (None, -1)),
            trigger=state.trigger.mark(b),
            static=state.statics.mark(b),
            segments=None if state.segments is None else state.segments.begun(b),
            seen=None if state.log is None else state.log.mark(b),
            held=state.held.get(b),
        )

    def restore(self, state: Reversible, b: int, store: StoreMark) -> None:
        """Takes the last step of a sequence back."""
        zone = state.store.host[b].length
        state.store.rewind(b, store)
        if state.store.host[b].length < zone:
            state.fetched.pop(b, None)  # the ids of removed rows may be given to other rows
        state.prompt_from[b] = self.prompt_from
        if state.index is not None:
            with state.building_index():
                state.index.rewind(b, self.index)
        state.trigger.rewind(b, self.trigger)
        state.statics.rewind(b, self.static)
        if state.segments is not None:
            state.segments.rewind(b, self.segments)
        if state.log is not None:
            state.log.rewind(b, self.seen)
        state.held.pop(b, None)
        if self.held is not None:
            state.held[b] = self.held


class LastSteps:
    """Records of the decode steps of the last call. Copies of the layer do not get them."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Drops the records: no step can be undone."""
        self._steps: list[tuple[StoreMark, list[Before]]] = []  # per step: the store, and each sequence
        self._undone: list[int] = []  # steps of each sequence that were undone since then
        self._tokens: list[int] = []  # length of each sequence, if nothing else has changed it

    def before_step(self, state: Reversible) -> None:
        """Records the state before another step of the call."""
        self._steps.append((state.store.before_step(), [Before.of(state, b) for b in range(state.store.sequences)]))

    def end(self, state: Reversible) -> None:
        """Ends the call."""
        state.store.end_steps()
        sequences = range(state.store.sequences)
        self._undone, self._tokens = [0 for _ in sequences], [state.store.zones(b).total for b in sequences]

    def rewind(self, state: Reversible, sequence: int, tokens: int) -> bool:
        """Undoes the steps of a sequence after its first `tokens` tokens. Returns False and changes nothing if these are not
        its last steps or began with more tokens."""
        if not self._tokens or state.store.zones(sequence).total != self._tokens[sequence]:
            return False
        left = len(self._steps) - self._undone[sequence]
        target = next((n for n in reversed(range(left)) if self._steps[n][1][sequence].tokens == tokens), None)
        target = left if tokens == self._tokens[sequence] else target
        if target is None:
            return False
        for store, before in reversed(self._steps[target:left]):
            before[sequence].restore(state, sequence, store)
        self._undone[sequence], self._tokens[sequence] = len(self._steps) - target, tokens
        return True

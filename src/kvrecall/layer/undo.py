"""Atomic changes of a layer: after an error the layer holds what it held before.

1. `begin` marks the layer before anything changes.
2. `commit` removes the mark, by one assignment, when everything is done.
3. After an error, `undo` goes back to the mark: rows and lengths exactly. The index is cut back if it is whole, else it is
   rebuilt from the rows.

An error can strike where no handler catches it: an exception set by another thread, or a second one during handling. The mark
then stays, and the next user of the layer goes back to it first (`mend`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvrecall.select.queries import ObservedQueries

if TYPE_CHECKING:
    from kvrecall.layer.state import LayerState


@dataclass(frozen=True)
class Mark:
    """State of a layer beside its store. rewind: restores the counters of the layer's owner."""

    prompt_from: list[int | None]
    seen: list[ObservedQueries | None]
    rewind: Callable[[], None]


@contextmanager
def all_of_it(state: LayerState, rewind: Callable[[], None] = lambda: None) -> Iterator[None]:
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


def begin(state: LayerState, rewind: Callable[[], None]) -> None:
    """Marks the layer's present state, after making its index whole."""
    if state.half_built:
        _renew_index(state)
    state.store.mark()
    state.mark = Mark(list(state.prompt_from), [] if state.log is None else state.log.kept(), rewind)


def commit(state: LayerState) -> None:
    """Ends the change: everything is done."""
    state.mark = None
    state.store.keep()


def mend(state: LayerState) -> bool:
    """Undoes an unfinished change. Returns whether there was one."""
    if state.mark is not None:
        undo(state)
        return True
    if state.half_built:
        _renew_index(state)
    return False


def undo(state: LayerState) -> None:
    """Goes back to the mark. Can be called again after an error inside it, for example refused memory for a new index."""
    mark = state.mark
    assert mark is not None
    state.last_steps.forget()
    state.store.restore()
    mark.rewind()
    state.prompt_from = [None if now is None else then for now, then in zip(state.prompt_from, mark.prompt_from, strict=True)]
    if state.log is not None:
        state.log.restore(mark.seen)
    for b in range(state.store.sequences):
        state.forget(b)
    _undo_index(state)
    commit(state)


def _undo_index(state: LayerState) -> None:
    """Cuts the index back to the retrieval zone. Rebuilds it if it may be torn or lacks tokens."""
    if state.index is None:
        return
    known, stored = list(state.index.lengths), [pool.length for pool in state.store.host]
    if state.half_built or any(own < held for own, held in zip(known, stored, strict=True)):
        _renew_index(state)
        return
    with state.building_index():
        for b, (own, held) in enumerate(zip(known, stored, strict=True)):
            if own > held:
                state.index.truncate(b, held)
            if state.static_config is not None:
                state.index.exclude(b, None)


def _renew_index(state: LayerState) -> None:
    """Rebuilds the index: its tables may hold anything, but all rows are there. Static sets are chosen again, too."""
    state.half_built = True  # until the new index is whole
    state.last_steps.forget()
    state.index = index = state.method.build_index(state.shape)
    assert index is not None
    index.bind(state.store.host)
    state.prompt_from = [0] * state.store.sequences
    for b in range(state.store.sequences):
        state.forget(b)
    state.reindex()
    state.half_built = False

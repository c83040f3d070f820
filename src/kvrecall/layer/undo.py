"""All of a change to a layer, or nothing of it: where an error ends the change, the layer holds what it held before.

1. The layer is marked before anything is changed (`begin`).
2. One assignment takes the mark away when everything is done (`commit`).
3. After an error the layer goes back to the mark (`undo`): rows and lengths exactly, the index as far as it is whole. An index
   that is not is made anew from the rows.

An error can strike where nothing catches it: an exception that another thread sets, or a second one while the first is being
handled. The mark is still there then, and whoever uses the layer next goes back to it first (`mend`).
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
    """What a layer remembers beside its store. rewind: brings back what the layer's owner counts."""

    prompt_from: list[int | None]
    seen: list[ObservedQueries | None]
    rewind: Callable[[], None]


@contextmanager
def all_of_it(state: LayerState, rewind: Callable[[], None] = lambda: None) -> Iterator[None]:
    """The changes inside are made as a whole. Within such a block there is nothing more to do."""
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
    """Marks the layer as it is, once its index is whole."""
    if state.half_built:
        _renew_index(state)
    state.store.mark()
    state.mark = Mark(list(state.prompt_from), [] if state.log is None else state.log.kept(), rewind)


def commit(state: LayerState) -> None:
    """Everything is done."""
    state.mark = None
    state.store.keep()


def mend(state: LayerState) -> bool:
    """Undoes a change that was left in its middle; returns whether there was one."""
    if state.mark is not None:
        undo(state)
        return True
    if state.half_built:
        _renew_index(state)
    return False


def undo(state: LayerState) -> None:
    """Goes back to the mark. May be called again after an error in it, memory refused for a new index, say."""
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
    """Cuts the index back to the retrieval zone, or makes it anew where it may be torn, or knows less than there is."""
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
    """Nobody knows what its tables hold, but the rows are all there. Static sets, which it left out, are chosen anew, too."""
    state.half_built = True  # until the new one is whole
    state.last_steps.forget()
    state.index = index = state.method.build_index(state.shape)
    assert index is not None
    index.bind(state.store.host)
    state.prompt_from = [0] * state.store.sequences
    for b in range(state.store.sequences):
        state.forget(b)
    state.reindex()
    state.half_built = False

"""Undoes decode steps of one call exactly, so that rejected guesses leave nothing behind.

1. A call of several decode steps records, before each step, what the step will change (`LastSteps.before_step`).
2. A crop to one of these tokens undoes the steps after it, the last one first (`LastSteps.rewind`): rows, zones, index,
   trigger, static set, held selection and logs are as they were.
3. Any other change of the layer drops the records (`LastSteps.forget`). A crop then drops conclusions instead: the trigger
   fires at the next step and the static set is chosen again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvrecall.cache.layer import StoreMark
    from kvrecall.core.structs import HeldSelection
    from kvrecall.layer.state import LayerState
    from kvrecall.select.queries import ObservedQueries


@dataclass(frozen=True)
class Before:
    """State of one sequence before one step."""

    tokens: int
    prompt_from: int | None
    index: Any
    trigger: Any
    static: Any
    segments: Any
    seen: ObservedQueries | None
    held: HeldSelection | None


class LastSteps:
    """Records of the decode steps of the last call, if it made several. Copies of the layer do not get them."""

    def __init__(self) -> None:
        self._stores: list[StoreMark] = []
        self._before: list[list[Before]] = []  # per step, per sequence
        self._undone: list[int] = []  # steps of each sequence that were undone since then
        self._tokens: list[int] = []  # length of each sequence, if nothing else has changed it

    def forget(self) -> None:
        """Drops the records: no step can be undone."""
        self._stores, self._before, self._undone, self._tokens = [], [], [], []

    def before_step(self, state: LayerState) -> None:
        """Records the state before another step of the call."""
        self._stores.append(state.store.before_step())
        self._before.append([_before(state, b) for b in range(state.store.sequences)])

    def end(self, state: LayerState) -> None:
        """Ends the call."""
        state.store.end_steps()
        sequences = range(state.store.sequences)
        self._undone, self._tokens = [0 for _ in sequences], [state.store.zones(b).total for b in sequences]

    def rewind(self, state: LayerState, sequence: int, tokens: int) -> bool:
        """Undoes the steps of a sequence after its first `tokens` tokens. Returns False and changes nothing if these are not
        its last steps or began with more tokens."""
        if not self._tokens or state.store.zones(sequence).total != self._tokens[sequence]:
            return False
        left = len(self._before) - self._undone[sequence]
        target = next((n for n in reversed(range(left)) if self._before[n][sequence].tokens == tokens), None)
        target = left if tokens == self._tokens[sequence] else target
        if target is None:
            return False
        for number in reversed(range(target, left)):
            _undo(state, sequence, self._stores[number], self._before[number][sequence])
        self._undone[sequence], self._tokens[sequence] = len(self._before) - target, tokens
        return True


def _before(state: LayerState, b: int) -> Before:
    begun = state.prompt_from[b]
    return Before(
        tokens=state.store.zones(b).total,
        prompt_from=begun,
        index=None if state.index is None else state.index.mark(b, begun not in (None, -1)),
        trigger=state.trigger.mark(b),
        static=state.statics.mark(b),
        segments=None if state.segments is None else state.segments.begun(b),
        seen=None if state.log is None else state.log.seen(b),
        held=state.held.get(b),
    )


def _undo(state: LayerState, b: int, store: StoreMark, before: Before) -> None:
    zone = state.store.host[b].length
    state.store.rewind(b, store)
    if state.store.host[b].length < zone:
        state.fetched.pop(b, None)  # the ids of removed rows may be given to other rows
    state.prompt_from[b] = before.prompt_from
    if state.index is not None:
        with state.building_index():
            state.index.rewind(b, before.index)
    state.trigger.rewind(b, before.trigger)
    state.statics.rewind(b, before.static)
    if state.segments is not None:
        state.segments.rewind(b, before.segments)
    if state.log is not None:
        state.log.rewind(b, before.seen)
    state.held.pop(b, None)
    if before.held is not None:
        state.held[b] = before.held

"""Sequences of layers in slots, as a decoder puts them there."""

from __future__ import annotations

from kvrecall.layer.slots.layers import Joined, Layers, roomy
from kvrecall.layer.state import LayerState


def in_slots(states: list[LayerState], room: int, spare: int = 0) -> tuple[Layers, Joined]:
    """All sequences of some layers of one cache in slots of a step. spare: slots in front of theirs that nobody uses."""
    count = states[0].store.sequences
    joined = Joined(states, list(range(spare, spare + count)), room)
    try:
        layers = Layers(states, spare + count, roomy(joined.behind_sink))
        layers.join(joined)
    except BaseException:
        joined.undo()
        raise
    return layers, joined

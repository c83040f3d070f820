"""Sequences of layers in slots, as a decoder puts them there."""

from __future__ import annotations

from kvrecall.index.table import bucket_length
from kvrecall.layer.slots.layers import Layers, SlotLease
from kvrecall.layer.state import LayerState


def in_slots(states: list[LayerState], room: int, spare: int = 0) -> tuple[Layers, SlotLease]:
    """All sequences of some layers of one cache in slots of a step. spare: slots in front of theirs that nobody uses."""
    count = states[0].store.sequences
    joined = SlotLease(states, list(range(spare, spare + count)), room)
    try:
        layers = Layers(states, spare + count, bucket_length(joined.behind_sink))
        layers.join(joined)
    except BaseException:
        joined.undo()
        raise
    return layers, joined

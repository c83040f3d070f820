"""The tokens of a layer sorted into other zones, as if its prompt had been read with them from the start.

A fork to a method with the same zones shares its rows; one to other zones copies them. The copy takes the way of any prompt:
rows settle in the zones, what moves to the host is indexed, and the index sees the queries that are remembered.
"""

from __future__ import annotations

from kvrecall.cache.blocks import BlockTable
from kvrecall.cache.transfer import bring
from kvrecall.index.base import LayerShape
from kvrecall.layer.state import LayerState
from kvrecall.layer.undo import mend
from kvrecall.methods.base import Method

_PIECE_TOKENS = 4096
"""Tokens that settle at once: bounds what the device holds twice."""


def rezoned(
    state: LayerState, method: Method, *, expect_tokens: int = 0, observe_queries: int = 0,
    shape: LayerShape | None = None, tables: list[BlockTable] | None = None, rows_on_device: bool | None = None,
) -> LayerState:  # fmt: skip
    """The same sequences under a method with zones of its own, with counters at zero. `state` stays as it is.

    expect_tokens: final length per sequence, to size memory exactly. observe_queries: see `LayerState`.
    shape: the same with another calibration. tables: new block tables, which the layers of a cache share. rows_on_device: see
    `LayerState`.
    """
    mend(state)
    shape = shape or state.shape
    other = LayerState(state.layer, shape, method, state.counters.timed, observe_queries, tables, rows_on_device)
    other.scaling = state.scaling
    other.flagged_as(state)
    if state.log is not None and other.log is not None:
        other.log.take_over(state.log)
    zones = other.store.sizes
    for b in range(shape.sequences):
        total = max(expect_tokens, state.store.zones(b).total)
        retrieved = max(0, total - zones.sink_tokens - zones.local_tokens)
        other.store.host[b].reserve(retrieved)
        if other.index is not None:
            other.index.reserve(retrieved)
        for block in state.store.blocks(b, on_device=True):
            for start in range(0, block.shape[1], _PIECE_TOKENS):
                rows = bring(block[:, start : start + _PIECE_TOKENS], shape.device)
                other.absorb(b, other.store.append_chunk(b, rows[:, :, 0], rows[:, :, 1]))
        if other.log is not None and (seen := other.log.seen(b)) is not None:
            other.watch(b, seen)
        other.prompt_from[b] = 0
    other.counters = other.counters.fresh()
    return other

"""Sorts the tokens of a layer into other zones, as if the prompt had been read with them.

A fork with the same zones shares rows; with other zones it copies them. The copy is treated like a prompt: rows settle in the
zones, rows that move to the host are indexed, and the index sees the observed queries.
"""

from __future__ import annotations

from kvrecall.cache.blocks import BlockTable
from kvrecall.cache.copies import bring
from kvrecall.index.base import LayerShape
from kvrecall.layer.history import mend
from kvrecall.layer.state import LayerState
from kvrecall.methods.base import Method

_PIECE_TOKENS = 4096
"""Tokens that settle at a time: bounds the device memory for copies."""


def rezoned(
    state: LayerState, method: Method, *, expect_tokens: int = 0, observe_queries: int = 0,
    shape: LayerShape | None = None, tables: list[BlockTable] | None = None, rows_on_device: bool | None = None,
) -> LayerState:  # fmt: skip
    """The same sequences under a method with other zones, with counters at zero. `state` is not changed.

    expect_tokens: final length per sequence, to size memory exactly. observe_queries: see `LayerState`.
    shape: the same with statistics. tables: new block tables, which the layers of a cache share. rows_on_device: see
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
        for block in state.store.stored(b):
            for rows in bring(block, shape.device).split(_PIECE_TOKENS, 1):
                if rows.shape[1]:
                    other.absorb(b, other.store.append_chunk(b, rows[:, :, 0], rows[:, :, 1]))
        if other.log is not None and (seen := other.log.seen(b)) is not None:
            other.watch(b, seen)
        other.prompt_from[b] = 0
    other.counters = other.counters.fresh()
    return other

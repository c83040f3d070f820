"""The one seam between a backend and the layers: q, k and v of new tokens go in, their attention comes out.

A backend says which tokens of which sequences are real and whether they belong to a prompt. It never reaches into a stage. What
every backend would have to do alike is done here: NaN and infinity are noticed before anything is stored, indexes compute in
fp32, signals wait, and all of a pass over a layer is done or nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvrecall.backends.interrupt import deferred_interrupt
from kvrecall.backends.memory import all_or_nothing
from kvrecall.core.structs import AttentionParams
from kvrecall.layer.pipeline import decode_step, decode_steps, prefill_layer
from kvrecall.layer.state import LayerState

MOST_QUERIES = 8
"""Tokens per sequence of one pass that are decoded, each with a search of its own. More are attended densely, as a prompt's
are: one pass over all rows serves all of them."""


@dataclass(frozen=True)
class NewTokens:
    """The next T tokens of all sequences of a layer.

    queries: `[B, H_q, T, D]`; keys, values: `[B, H_kv, T, D]`, rotated and in the dtype that is stored. valid: bool `[B, T]` on
    the CPU, False for padding, which is never stored (None: all are real). prompt: they are a chunk of a prompt, however few.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    valid: Tensor | None = None
    prompt: bool = False

    @property
    def count(self) -> int:
        """T, tokens per sequence, padding included."""
        return self.queries.shape[2]


def attend(
    state: LayerState, new: NewTokens, params: AttentionParams, counted: Callable[[], None], uncounted: Callable[[], None]
) -> Tensor:
    """Stores the new tokens and attends: `[B, H_q, T, D]`, in the queries' dtype.

    Tokens of a prompt are attended densely and settle the zones. All others are decode queries, up to `MOST_QUERIES` of them:
    each attends to what it would find if it were fed alone, and `LayerState.crop` takes any of them back exactly. Several
    tokens of sequences that hold nothing yet are a prompt's, too.

    counted: what the backend itself notes of them, called last of all. uncounted: takes that back, as often as it is called.
    Raises NonFiniteError, HostMemoryError and DeviceMemoryError; the layer is then as it was.
    """
    state.guard(new.keys, new.values)
    _gather(state, new)
    exact = torch.autocast(new.keys.device.type, enabled=False)  # indexes compute in fp32
    with exact, deferred_interrupt(), all_or_nothing(state, new.count, uncounted):
        out = _attend(state, new, params)
        counted()
    return out


def _attend(state: LayerState, new: NewTokens, params: AttentionParams) -> Tensor:
    tensors = new.queries, new.keys, new.values
    several = new.count > 1
    begins = several and not any(state.store.zones(b).total for b in range(state.store.sequences))
    if new.prompt or begins or new.count > MOST_QUERIES:
        return prefill_layer(state, *tensors, new.valid, params)
    if several:
        return decode_steps(state, *tensors, new.valid, params)
    return decode_step(state, *tensors, None if new.valid is None else new.valid[:, 0].tolist(), params)


def _gather(state: LayerState, new: NewTokens) -> None:
    """Shows new tokens to statistics that are still gathered, before they are stored."""
    calibration = state.shape.calibration
    if calibration is None or calibration.settled:
        return
    for b in range(state.shape.sequences):
        kept = slice(None) if new.valid is None else new.valid[b].nonzero()[:, 0].to(new.keys.device)
        calibration.see(new.keys[b][:, kept], new.queries[b][:, kept], state.store.zones(b).total)

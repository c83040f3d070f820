"""The one seam between a backend and the layers: q, k and v of new tokens go in, their attention comes out.

A backend says which tokens are padding and whether they belong to a prompt. It never calls a stage. This file does what all
backends need: NaN and infinity are noticed before anything is stored, indexes compute in fp32, signals wait, and a pass over a
layer is complete or undone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvrecall.backends.interrupt import deferred_interrupt
from kvrecall.backends.memory import all_or_nothing
from kvrecall.core.structs import AttentionParams
from kvrecall.layer.pipeline import SharedPast, attend_shared, decode_step, decode_steps, prefill_layer
from kvrecall.layer.state import LayerState

MOST_QUERIES = 8
"""Up to this many tokens per sequence in one pass are decoded, each with its own search. More tokens attend to everything like
a prompt, in one pass over all rows."""


@dataclass(frozen=True)
class NewTokens:
    """The next T tokens of all sequences of a layer.

    queries: `[B, H_q, T, D]`; keys, values: `[B, H_kv, T, D]`, post-RoPE, in the dtype of the cache. valid: bool `[B, T]` on
    the CPU, False for padding, which is never stored (None: no padding). prompt: they are a chunk of a prompt, even if few.
    shared: of a chunk, per sequence, attention that was made already.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    valid: Tensor | None = None
    prompt: bool = False
    shared: Sequence[SharedPast] | None = None

    @property
    def count(self) -> int:
        """T, tokens per sequence, padding included."""
        return self.queries.shape[2]


def attend(
    state: LayerState, new: NewTokens, params: AttentionParams, counted: Callable[[], None], uncounted: Callable[[], None]
) -> Tensor:
    """Stores the new tokens and attends: `[B, H_q, T, D]`, in the queries' dtype.

    Tokens of a prompt attend to everything and settle the zones. Up to `MOST_QUERIES` other tokens are decode queries: each
    finds what it would find alone, and `LayerState.crop` takes any of them back exactly. Several first tokens of a sequence
    are a prompt, too.

    counted: the backend's own bookkeeping, called last. uncounted: undoes it; may be called several times.
    Raises NonFiniteError, HostMemoryError and DeviceMemoryError; the layer is then unchanged.
    """
    state.non_finite.guard(new.keys, new.values)
    exact = torch.autocast(new.keys.device.type, enabled=False)  # indexes compute in fp32
    with exact, deferred_interrupt(), all_or_nothing(state, new.count, uncounted):
        out = _attend(state, new, params)
        counted()
    return out


def attend_together(chunks: Sequence[tuple[LayerState, int, Tensor]], params: AttentionParams) -> list[SharedPast] | None:
    """As `layer.pipeline.attend_shared`, for queries of any dtype under autocast."""
    (state, *_), *_ = chunks
    with torch.autocast(state.shape.device.type, enabled=False), deferred_interrupt():
        return attend_shared([(layer, b, queries.to(state.shape.dtype)) for layer, b, queries in chunks], params)


def _attend(state: LayerState, new: NewTokens, params: AttentionParams) -> Tensor:
    tensors = new.queries, new.keys, new.values
    several = new.count > 1
    begins = several and not any(state.store.zones(b).total for b in range(state.store.sequences))
    if new.prompt or begins or new.count > MOST_QUERIES:
        return prefill_layer(state, *tensors, new.valid, params, new.shared)
    if several:
        return decode_steps(state, *tensors, new.valid, params)
    return decode_step(state, *tensors, None if new.valid is None else new.valid[:, 0].tolist(), params)

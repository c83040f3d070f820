"""Before a captured step is trusted: its first replay, layer by layer, beside the uncaptured layers.

The replay is a trial that `forget_trial` undoes. What every layer was asked in it, the uncaptured layer is asked too, on a copy
of that one layer's summaries, made and dropped before the next layer's; rows on the host are shared. So it takes one uncaptured
step's time and one layer's memory, once per recording. Layers are compared by what the replay itself asked them, because a
difference in rounding grows from layer to layer. Logits are compared too: they show what is wrong between the layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvrecall.core.errors import CaptureError, CaptureMismatchError
from kvrecall.core.structs import AttentionParams
from kvrecall.layer.pipeline import decode_step
from kvrecall.layer.state import LayerState

TOLERANCE = 0.02
"""Largest relative L2 difference of one attention, see docs/design/tolerances.md."""
LOGITS_TOLERANCE = 0.25
"""The same of the logits of the warm-up and of the replay, which are made by the same kernels."""
_REMEDY = "Decode uncaptured (capture=None), and report it with the model, the method and the GPU."


@dataclass(frozen=True)
class Attended:
    """What one layer was asked in a step, queries, keys and values `[slots, H, 1, D]`, and its answer `[slots, H_q, 1, D]`."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    params: AttentionParams
    out: Tensor

    def of(self, slots: list[int]) -> Attended:
        """The same for some of the slots."""
        return Attended(self.queries[slots], self.keys[slots], self.values[slots], self.params, self.out[slots])


def difference(made: Tensor, expected: Tensor) -> float:
    """The relative L2 difference of `[B, …]`, any float dtype, of the sequence that differs most; a sequence that is finite on
    neither side does not differ."""
    made, expected = made.flatten(1).float(), expected.flatten(1).float()
    error = (made - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
    unknown = ~expected.isfinite().all(-1) & ~made.isfinite().all(-1)  # non-finite keys are reported by another check
    return float(error.masked_fill(unknown, 0.0).nan_to_num(float("inf")).max())


def check_attention(layer: int, asked: Attended, uncaptured: Callable[[Attended], Tensor]) -> None:
    """Raises CaptureMismatchError where a layer answered otherwise than `uncaptured` does, and CaptureError where the device
    has no memory to tell."""
    try:
        expected = uncaptured(asked)
    except torch.OutOfMemoryError as error:
        told = f"the GPU has no memory for a copy of layer {layer}'s summaries, by which its first captured step is checked"
        raise CaptureError(told, "Decode uncaptured (capture=None), or reserve fewer tokens.") from error
    _require(f"the attention of layer {layer}", difference(asked.out, expected), TOLERANCE)


def check_logits(replayed: Tensor, launched: Tensor) -> None:
    """Raises CaptureMismatchError where the logits `[B, vocabulary]` of a replay are not those of the launches it recorded."""
    sides = [x.float() - x.float().mean(-1, keepdim=True) for x in (replayed, launched)]  # a constant means nothing
    _require("logits", difference(*sides), LOGITS_TOLERANCE)


def uncaptured_answer(state: LayerState, asked: Attended) -> Tensor:
    """What the uncaptured layer makes of a step `[B, H_q, 1, D]`. The state is one that a captured layer has borrowed, before
    its first step; it is left as it is."""
    every = list(range(state.shape.sequences))
    try:
        return _answer(state, asked, every)
    except torch.OutOfMemoryError:  # sequence by sequence takes less
        if len(every) == 1:
            raise
    return torch.cat([_answer(state, asked, [b]) for b in every])


class _Glance(LayerState):
    """A copy that makes the attention of one step and is thrown away: it moves nothing to the host and begins no work for later
    steps, and the static set of this one is there."""

    def begin_static(self, sequence: int) -> None:
        pass

    def evict(self, sequence: int) -> None:
        pass


def _answer(state: LayerState, asked: Attended, sequences: list[int]) -> Tensor:
    whole = len(sequences) == state.shape.sequences
    queries, keys, values = (x if whole else x[sequences] for x in (asked.queries, asked.keys, asked.values))
    copy = state.copied(sequences)  # which counts for itself, unlike that of `select`
    copy.__class__ = _Glance
    copy.held, copy.fetched, copy.on_search = {}, {}, None
    return decode_step(copy, queries, keys, values, None, asked.params)


def _require(what: str, error: float, tolerance: float) -> None:
    if error > tolerance:
        told = f"in its first replay {what} differs from the uncaptured step by {error:.3f} of its norm, more than {tolerance}"
        raise CaptureMismatchError(told, _REMEDY)

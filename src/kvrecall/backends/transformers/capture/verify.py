"""Checks a captured step before it is used: compares its first replay with the uncaptured layers, layer by layer.

The replay is a trial that `forget_trial` undoes. Each uncaptured layer gets the inputs that the layer had in the replay,
because rounding differences grow from layer to layer. It works on a copy of its summaries, one layer at a time, and shares rows
on the host. So the check takes the time of one uncaptured step and the memory of one layer, once per recording. Logits are
compared too, to find errors between the layers.
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
"""The same for the logits of warm-up and replay, which the same kernels compute."""
_REMEDY = "Decode uncaptured (capture=None), and report it with the model, the method and the GPU."


@dataclass(frozen=True)
class Attended:
    """One layer's inputs in a step of T tokens, queries, keys and values `[slots, H, T, D]`, and its output
    `[slots, H_q, T, D]`."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    params: AttentionParams
    out: Tensor

    def of(self, slots: list[int]) -> Attended:
        """The part of some slots."""
        return Attended(self.queries[slots], self.keys[slots], self.values[slots], self.params, self.out[slots])


def difference(made: Tensor, expected: Tensor) -> float:
    """The largest relative L2 difference of a sequence, for `[B, …]` of any float dtype. Sequences that are not finite on both
    sides do not count."""
    made, expected = made.flatten(1).float(), expected.flatten(1).float()
    error = (made - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
    unknown = ~expected.isfinite().all(-1) & ~made.isfinite().all(-1)  # non-finite keys are reported by another check
    return float(error.masked_fill(unknown, 0.0).nan_to_num(float("inf")).max())


def check_attention(layer: int, attended: Attended, uncaptured: Callable[[Attended], Tensor]) -> None:
    """Raises CaptureMismatchError if a layer's output differs from `uncaptured`'s, and CaptureError if the device has no memory
    for the check."""
    try:
        expected = uncaptured(attended)
    except torch.OutOfMemoryError as error:
        reason = f"the GPU has no memory for a copy of layer {layer}'s summaries, by which its first captured step is checked"
        raise CaptureError(reason, "Decode uncaptured (capture=None), or reserve fewer tokens.") from error
    _require(f"the attention of layer {layer}", difference(attended.out, expected), TOLERANCE)


def check_logits(replayed: Tensor, launched: Tensor) -> None:
    """Raises CaptureMismatchError if the logits `[B, vocabulary]` of a replay differ from those of its warm-up."""
    sides = [x.float() - x.float().mean(-1, keepdim=True) for x in (replayed, launched)]  # up to a constant
    _require("logits", difference(*sides), LOGITS_TOLERANCE)


def uncaptured_answer(state: LayerState, attended: Attended) -> Tensor:
    """The uncaptured layer's output for a step, `[B, H_q, T, D]`. state: borrowed by a captured layer, before its first step;
    not changed."""
    every = list(range(state.shape.sequences))
    try:
        return _answer(state, attended, every)
    except torch.OutOfMemoryError:  # one sequence at a time needs less memory
        if len(every) == 1:
            raise
    return torch.cat([_answer(state, attended, [b]) for b in every])


class _ReadOnlyState(LayerState):
    """A copy for the attention of one step. It moves nothing to the host and begins no work for later steps; its static set is
    complete."""

    def begin_static(self, sequence: int) -> None:
        pass

    def evict(self, sequence: int) -> None:
        pass


def _answer(state: LayerState, attended: Attended, sequences: list[int]) -> Tensor:
    whole = len(sequences) == state.shape.sequences
    queries, keys, values = (x if whole else x[sequences] for x in (attended.queries, attended.keys, attended.values))
    copy = state.copied(sequences)  # with its own counters, unlike `select`
    copy.__class__ = _ReadOnlyState
    copy.held, copy.fetched, copy.on_search = {}, {}, None
    tokens = [slice(t, t + 1) for t in range(queries.shape[2])]
    made = [decode_step(copy, queries[:, :, t], keys[:, :, t], values[:, :, t], None, attended.params) for t in tokens]
    return made[0] if len(made) == 1 else torch.cat(made, 2)


def _require(what: str, error: float, tolerance: float) -> None:
    if error > tolerance:
        reason = (
            f"in its first replay {what} differs from the uncaptured step by {error:.3f} of its norm, more than {tolerance}"
        )
        raise CaptureMismatchError(reason, _REMEDY)

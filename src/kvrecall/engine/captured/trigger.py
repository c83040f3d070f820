"""The trigger of one captured layer: its memory on the device, taken over from the uncaptured trigger and given back to it."""

# A launch takes what only Triton knows.
# pyright: reportCallIssue=false, reportIndexIssue=false, reportArgumentType=false

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvrecall.core.launch import next_power_of_2, overlapping
from kvrecall.engine.captured.trigger_kernels import MISSING, UNKNOWN, trigger_kernel, turned_kernel
from kvrecall.layer.state import LayerState
from kvrecall.trigger import BoundaryTrigger, EveryStep, FixedStride, SemanticBoundary, StrideTrigger
from kvrecall.trigger.speculative import Speculative, SpeculativeTrigger

_NEVER = 2**31 - 1


@dataclass(frozen=True)
class Marks:
    """Where segments begin. marks: uint8 `[B, TOKENS]`, by number of the token. ordinals: int32 `[B]`, any stride, the numbers
    that the tokens of this step have."""

    marks: Tensor
    ordinals: Tensor


class DeviceTrigger:
    """Decides for all sequences of one layer, step after step, without the host."""

    def __init__(self, state: LayerState, width: int, marks: Marks | None = None) -> None:
        """width: flags per sequence, all alike but for a speculative trigger, which decides for each of `width` KV heads."""
        shape, self._config = state.shape, state.method.trigger_config()
        self._state, self._width, self._marks = state, width, marks
        b = shape.sequences

        def ints(*size: int, fill: int = 0) -> Tensor:
            return torch.full(size, fill, dtype=torch.int32, device=shape.device)

        self.fire, self.searches = ints(b, width, fill=1), ints(b)
        """fire: int32 `[B, width]`, whether this step searches. searches: how often each sequence has, if not always."""
        self.every_step = isinstance(self._config, EveryStep)
        self.early = isinstance(self._config, Speculative)
        """Whether a search with the queries of the step before, `before`, comes first, and `fire` says whose is made again."""
        self.always = torch.ones_like(self.fire)
        self._since, self._fresh = ints(b), ints(b)
        kind = shape.dtype if self.early else torch.float32
        self.before = torch.zeros(b, shape.query_heads, shape.head_dim, dtype=kind, device=shape.device)
        self.threshold = -2.0
        """The cosine below which it fires."""
        if isinstance(self._config, SemanticBoundary):
            self.threshold = self._config.at(state.layer)
        elif isinstance(self._config, Speculative):
            self.threshold = float(self._config.threshold)
        self.adopt()

    def launch(self, queries: Tensor) -> None:
        """Decides, for queries `[B, H_q, 1, D]` (contiguous) of a step."""
        config, shape = self._config, self._state.shape
        dim, padded = shape.head_dim, next_power_of_2(shape.head_dim)
        if isinstance(config, EveryStep):
            return  # `fire` is never anything but 1
        if isinstance(config, Speculative):
            turned_kernel[(shape.sequences,)](
                queries, self.before, self._fresh, self.fire, self.threshold, D=dim, BD=padded,
                G=shape.query_heads // shape.kv_heads, HEADS=shape.kv_heads, num_warps=1,
            )  # fmt: skip
            return
        semantic = isinstance(config, SemanticBoundary)
        most = (config.max_stride or _NEVER) if isinstance(config, SemanticBoundary) else _NEVER
        marks = Marks(self._fresh, self._since) if self._marks is None else self._marks
        trigger_kernel[(shape.sequences,)](
            queries, self.before, self._since, self._fresh, self.fire, self.searches, marks.marks, marks.ordinals,
            self.threshold, most, config.steps if isinstance(config, FixedStride) else 1, marks.ordinals.stride(0),
            marks.marks.stride(0), D=dim, BD=padded, H=shape.query_heads, WIDTH=self._width, SEMANTIC=semantic,
            LAST=isinstance(config, SemanticBoundary) and config.compare == "retrieval", MARKS=self._marks is not None,
            num_warps=1, **overlapping(shape.device),
        )  # fmt: skip

    def adopt(self) -> None:
        """Goes on where the uncaptured steps ended, with nothing counted."""
        state, every = self._state, range(self._state.shape.sequences)
        trigger, fresh = state.trigger, [0 if b in state.held else MISSING.value for b in every]
        if isinstance(trigger, BoundaryTrigger | SpeculativeTrigger):
            known = trigger.reference if isinstance(trigger, BoundaryTrigger) else trigger.last
            for b, reference in enumerate(known):
                if reference is None:
                    fresh[b] |= UNKNOWN.value
                else:
                    self.before[b] = reference
        if isinstance(trigger, BoundaryTrigger | StrideTrigger):
            self._since.copy_(torch.tensor(trigger.since, dtype=torch.int32))
        self._fresh.copy_(torch.tensor(fresh, dtype=torch.int32))
        self.searches.zero_()

    def give_back(self, steps: int) -> int:
        """Leaves the trigger as uncaptured steps would have, `steps` of them; returns how many searches there were."""
        trigger, b = self._state.trigger, self._state.shape.sequences
        if steps and isinstance(trigger, BoundaryTrigger):
            trigger.reference = list(self.before.clone())
            trigger.since = self._since.tolist()
        elif steps and isinstance(trigger, SpeculativeTrigger):
            trigger.last = list(self.before.clone())
        elif isinstance(trigger, StrideTrigger):
            trigger.since = [since + steps for since in trigger.since]
        return steps * b if self.every_step or self.early else int(self.searches.sum())

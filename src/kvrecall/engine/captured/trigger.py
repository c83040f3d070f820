"""The trigger of one captured layer: a memory per slot, taken over from the uncaptured trigger and given back to it."""

# A launch takes what only Triton knows.
# pyright: reportCallIssue=false, reportIndexIssue=false, reportArgumentType=false

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvrecall.core.launch import next_power_of_2, overlapping
from kvrecall.engine.captured.base import Group
from kvrecall.engine.captured.trigger_kernels import MISSING, UNKNOWN, trigger_kernel, turned_kernel
from kvrecall.layer.state import LayerState
from kvrecall.trigger import BoundaryTrigger, EveryStep, FixedStride, SemanticBoundary, StrideTrigger
from kvrecall.trigger.speculative import Speculative, SpeculativeTrigger

_NEVER = 2**31 - 1


@dataclass(frozen=True)
class Marks:
    """Where segments begin. marks: uint8 `[slots, TOKENS]`, by number of the token. ordinals: int32 `[slots]`, any stride, the
    numbers that the tokens of this step have."""

    marks: Tensor
    ordinals: Tensor


class DeviceTrigger:
    """Decides for all slots of one layer, step after step, without the host."""

    def __init__(self, like: LayerState, slots: int, width: int, marks: Marks | None = None) -> None:
        """like: a state whose trigger is of the kind. width: flags per slot, all alike but for a speculative trigger, which
        decides for each of `width` KV heads."""
        shape, self._config = like.shape, like.method.trigger_config()
        self._shape, self._width, self._marks, b = shape, width, marks, slots

        def ints(*size: int, fill: int = 0) -> Tensor:
            return torch.full(size, fill, dtype=torch.int32, device=shape.device)

        self.fire, self.searches = ints(b, width, fill=1), ints(b)
        """fire: int32 `[slots, width]`, whether this step searches. searches: how often each has, if not always."""
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
            self.threshold = self._config.at(like.layer)
        elif isinstance(self._config, Speculative):
            self.threshold = float(self._config.threshold)

    def launch(self, queries: Tensor) -> None:
        """Decides, for queries `[slots, H_q, 1, D]` (contiguous) of a step."""
        config, shape, slots = self._config, self._shape, len(self._since)
        dim, padded = shape.head_dim, next_power_of_2(shape.head_dim)
        if isinstance(config, EveryStep):
            return  # `fire` is never anything but 1
        if isinstance(config, Speculative):
            turned_kernel[(slots,)](
                queries, self.before, self._fresh, self.fire, self.threshold, D=dim, BD=padded,
                G=shape.query_heads // shape.kv_heads, HEADS=shape.kv_heads, num_warps=1,
            )  # fmt: skip
            return
        semantic = isinstance(config, SemanticBoundary)
        most = (config.max_stride or _NEVER) if isinstance(config, SemanticBoundary) else _NEVER
        marks = Marks(self._fresh, self._since) if self._marks is None else self._marks
        trigger_kernel[(slots,)](
            queries, self.before, self._since, self._fresh, self.fire, self.searches, marks.marks, marks.ordinals,
            self.threshold, most, config.steps if isinstance(config, FixedStride) else 1, marks.ordinals.stride(0),
            marks.marks.stride(0), D=dim, BD=padded, H=shape.query_heads, WIDTH=self._width, SEMANTIC=semantic,
            LAST=isinstance(config, SemanticBoundary) and config.compare == "retrieval", MARKS=self._marks is not None,
            num_warps=1, **overlapping(shape.device),
        )  # fmt: skip

    def join(self, group: Group) -> None:
        """Goes on where the uncaptured steps of some sequences ended, with nothing counted."""
        trigger = group.state.trigger
        for b, slot in enumerate(group.slots):
            fresh = 0 if b in group.state.held else MISSING.value
            if isinstance(trigger, BoundaryTrigger | SpeculativeTrigger):
                reference = (trigger.reference if isinstance(trigger, BoundaryTrigger) else trigger.last)[b]
                if reference is None:
                    fresh |= UNKNOWN.value
                else:
                    self.before[slot] = reference
            if isinstance(trigger, BoundaryTrigger | StrideTrigger):
                self._since[slot] = trigger.since[b]
            self._fresh[slot], self.searches[slot] = fresh, 0

    def give_back(self, group: Group) -> int:
        """Leaves the trigger as uncaptured steps would have; returns how many searches there were."""
        trigger, slots, steps = group.state.trigger, group.slots, group.steps
        if isinstance(trigger, BoundaryTrigger):
            trigger.reference = list(self.before[slots])
            trigger.since = self._since[slots].tolist()
        elif isinstance(trigger, SpeculativeTrigger):
            trigger.last = list(self.before[slots])
        elif isinstance(trigger, StrideTrigger):
            trigger.since = [since + steps for since in trigger.since]
        return steps * len(slots) if self.every_step or self.early else int(self.searches[slots].sum())

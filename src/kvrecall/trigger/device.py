"""The trigger of one layer of a device step: a memory per slot, taken over from a trigger of the host and given back to it."""

# A launch takes what only Triton knows.
# pyright: reportCallIssue=false, reportIndexIssue=false, reportArgumentType=false

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from kvrecall.core.launch import next_power_of_2, overlapping
from kvrecall.parts import Part
from kvrecall.trigger import BoundaryTrigger, EveryStep, FixedStride, SemanticBoundary, StrideTrigger, Trigger
from kvrecall.trigger.kernels import MISSING, UNKNOWN, trigger_kernel, turned_kernel
from kvrecall.trigger.speculative import Speculative, SpeculativeTrigger

_NEVER = 2**31 - 1
_NUMBERS = 4096
"""Numbers of queries that a program reads at once, into the registers of four warps."""


@dataclass(frozen=True)
class Marks:
    """Where segments begin. marks: uint8 `[slots, TOKENS]`, by number of the token. ordinals: int32 `[slots]`, any stride, the
    numbers that the tokens of this step have."""

    marks: Tensor
    ordinals: Tensor


class DeviceTrigger:
    """Decides for all slots of one layer, step after step, without the host."""

    def __init__(
        self, config: Part, layer: int, slots: int, heads: int, dim: int, width: int, like: Tensor, marks: Marks | None = None
    ) -> None:
        """heads, dim: of the queries. width: flags per slot, all alike but for a speculative trigger, which decides for each of
        `width` KV heads. like: any tensor of the queries' dtype and device."""
        self._config, self._heads, self._dim = config, heads, dim
        self._width, self._marks, b, device = width, marks, slots, like.device

        def ints(*size: int, fill: int = 0) -> Tensor:
            return torch.full(size, fill, dtype=torch.int32, device=device)

        self.fire, self.searches = ints(b, width, fill=1), ints(b)
        """fire: int32 `[slots, width]`, whether this step searches. searches: how often each has, if not always."""
        self.every_step = isinstance(config, EveryStep)
        self.early = isinstance(config, Speculative)
        """Whether an early search runs with the previous step's queries, `before`. `fire[b] != 0` marks the sequences to search
        again."""
        self.always = torch.ones_like(self.fire)
        self._since, self._fresh = ints(b), ints(b)
        kind = like.dtype if self.early else torch.float32
        self.before = torch.zeros(b, heads, dim, dtype=kind, device=device)
        self.threshold = -2.0
        """The cosine below which it fires."""
        if isinstance(config, SemanticBoundary):
            self.threshold = config.at(layer)
        elif isinstance(config, Speculative):
            self.threshold = float(config.threshold)

    def launch(self, queries: Tensor) -> None:
        """Decides, for queries `[slots, H_q, 1, D]` (contiguous) of a step."""
        config, slots, dim, padded = self._config, len(self._since), self._dim, next_power_of_2(self._dim)
        if isinstance(config, EveryStep):
            return  # `fire` is always 1
        if isinstance(config, Speculative):
            turned_kernel[(slots,)](
                queries, self.before, self._fresh, self.fire, self.threshold, D=dim, BD=padded,
                BG=next_power_of_2(self._heads // self._width), G=self._heads // self._width, HEADS=self._width, num_warps=4,
            )  # fmt: skip
            return
        semantic = isinstance(config, SemanticBoundary)
        most = (config.max_stride or _NEVER) if isinstance(config, SemanticBoundary) else _NEVER
        marks = Marks(self._fresh, self._since) if self._marks is None else self._marks
        trigger_kernel[(slots,)](
            queries, self.before, self._since, self._fresh, self.fire, self.searches, marks.marks, marks.ordinals,
            self.threshold, most, config.steps if isinstance(config, FixedStride) else 1, marks.ordinals.stride(0),
            marks.marks.stride(0), D=dim, BD=padded, BH=max(1, min(next_power_of_2(self._heads), _NUMBERS // padded)),
            H=self._heads, WIDTH=self._width, SEMANTIC=semantic,
            LAST=isinstance(config, SemanticBoundary) and config.compare == "retrieval", MARKS=self._marks is not None,
            num_warps=4 if semantic else 1, **overlapping(queries.device),
        )  # fmt: skip

    def join(self, trigger: Trigger, slots: list[int], held: Collection[int]) -> None:
        """Takes over the state of a host trigger whose sequences are in these slots; counters start at 0. held: the sequences
        that have a selection."""
        for b, slot in enumerate(slots):
            fresh = 0 if b in held else MISSING.value
            if isinstance(trigger, BoundaryTrigger | SpeculativeTrigger):
                reference = (trigger.reference if isinstance(trigger, BoundaryTrigger) else trigger.last)[b]
                if reference is None:
                    fresh |= UNKNOWN.value
                else:
                    self.before[slot] = reference
            if isinstance(trigger, BoundaryTrigger | StrideTrigger):
                self._since[slot].fill_(trigger.since[b])  # to assign a number is a copy that waits
            self._fresh[slot].fill_(fresh)
            self.searches[slot].zero_()

    def give_back(self, trigger: Trigger, slots: list[int], steps: int) -> int:
        """Gives the state back to a host trigger, as if that one had decided the `steps` steps. Returns the number of
        searches."""
        if isinstance(trigger, BoundaryTrigger):
            trigger.reference = list(self.before[slots])
            trigger.since = self._since[slots].tolist()
        elif isinstance(trigger, SpeculativeTrigger):
            trigger.last = list(self.before[slots])
        elif isinstance(trigger, StrideTrigger):
            trigger.since = [since + steps for since in trigger.since]
        return steps * len(slots) if self.every_step or self.early else int(self.searches[slots].sum())

"""The trigger of one layer of a device step: a memory per slot, taken over from a trigger of the host and given back to it."""

# A launch takes what only Triton knows.
# pyright: reportCallIssue=false, reportIndexIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvrecall.core.launch import launch, next_power_of_2, overlapping
from kvrecall.core.triton import begin, end
from kvrecall.parts import Part
from kvrecall.trigger import (
    BoundaryTrigger,
    EveryStep,
    FixedStride,
    SemanticBoundary,
    Speculative,
    SpeculativeTrigger,
    StrideTrigger,
    Trigger,
)

UNKNOWN, MISSING = tl.constexpr(1), tl.constexpr(2)
"""Bits of a sequence's `fresh` flag: no query to compare with, so the trigger fires; nothing is held, so a search is due."""


@triton.jit
def head_queries(i_b, first, H, D: tl.constexpr, BD: tl.constexpr, BH: tl.constexpr):
    """Places `[BH, BD]` of the queries of heads first .. first + BH - 1 in `[B, H, D]`, and which of them exist."""
    o_h, o_d = first + tl.arange(0, BH), tl.arange(0, BD)
    return (i_b * H + o_h)[:, None] * D + o_d[None, :], (o_h < H)[:, None] & (o_d < D)[None, :]


@triton.jit
def cosines(b_q, b_p):
    """Cosines `[BH]` of the vectors in the rows of two fp32 matrices; 0 where one of them is 0."""
    b_size = tl.sqrt(tl.sum(b_q * b_q, 1)) * tl.sqrt(tl.sum(b_p * b_p, 1))
    return tl.where(b_size > 0, tl.sum(b_q * b_p, 1) / tl.where(b_size > 0, b_size, 1.0), 0.0)


@triton.jit
def trigger_kernel(
    p_queries, p_before, p_since, p_fresh, p_fire, p_searches, p_marks, p_ordinals, threshold, most, every, ORDINAL, TOKENS,
    D: tl.constexpr, BD: tl.constexpr, BH: tl.constexpr, H: tl.constexpr, WIDTH: tl.constexpr, SEMANTIC: tl.constexpr,
    LAST: tl.constexpr, MARKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (sequence): fire `[B, WIDTH]` = whether to search; counts searches.

    SEMANTIC (LouisKV section 4.1): the mean cosine of queries `[B, H, D]` and before fp32 `[B, H, D]`, the previous ones or
    (LAST) those that fired last, is below the threshold, or `most` steps have passed. Else every `every`-th step fires. since
    int32 `[B]`: steps since the last search, or all steps. MARKS: a step that fires marks its token, number ordinals[b *
    ORDINAL], in marks uint8 `[B, TOKENS]`: there a segment begins. BH heads are read at once: one by one, each would wait for
    the memory.
    """
    begin(PDL)
    i_b = tl.program_id(0)
    fresh, since = tl.load(p_fresh + i_b), tl.load(p_since + i_b)
    if SEMANTIC:
        b_sum = tl.zeros([BH], tl.float32)
        for first in tl.static_range(0, H, BH):
            o_q, m_q = head_queries(i_b, first, H, D, BD, BH)
            b_q = tl.load(p_queries + o_q, mask=m_q, other=0.0).to(tl.float32)
            b_sum += cosines(b_q, tl.load(p_before + o_q, mask=m_q, other=0.0))
            if not LAST:
                tl.debug_barrier()  # another thread may have read what this one writes
                tl.store(p_before + o_q, b_q, mask=m_q)
        since += 1
        fired = ((tl.sum(b_sum, 0) / H < threshold) | (since >= most) | ((fresh & UNKNOWN) != 0)).to(tl.int32)
        tl.store(p_since + i_b, tl.where(fired != 0, 0, since))
        if LAST:
            tl.debug_barrier()
            for first in tl.static_range(0, H, BH):
                o_q, m_q = head_queries(i_b, first, H, D, BD, BH)
                b_q = tl.load(p_queries + o_q, mask=m_q, other=0.0).to(tl.float32)
                tl.store(p_before + o_q, b_q, mask=m_q & (fired != 0))
    else:
        fired = (since % every == 0).to(tl.int32)
        tl.store(p_since + i_b, since + 1)
    search = tl.where((fresh & MISSING) != 0, 1, fired)
    tl.store(p_fresh + i_b, 0)
    for i in tl.static_range(WIDTH):
        tl.store(p_fire + i_b * WIDTH + i, search)
    tl.store(p_searches + i_b, tl.load(p_searches + i_b) + search)
    if MARKS:
        ordinal = tl.load(p_ordinals + i_b * ORDINAL).to(tl.int64)
        tl.store(p_marks + i_b * TOKENS + ordinal, 1, mask=fired != 0)
    end(PDL)


@triton.jit
def turned_kernel(p_queries, p_before, p_fresh, p_fire, threshold, D: tl.constexpr, BD: tl.constexpr, BG: tl.constexpr,
                  G: tl.constexpr, HEADS: tl.constexpr):  # fmt: skip
    """Program (sequence): fire `[B, HEADS]` = whether the queries `[B, HEADS, G, D]` of a KV head have turned away from those
    of the step before (FreeKV): their mean cosine is below the threshold. Remembers the queries in `before`, of their dtype.
    The G <= BG queries of a group are read at once.

    It comes after kernels of two streams, which no dependent launch allows.
    """
    i_b = tl.program_id(0)
    fresh = tl.load(p_fresh + i_b)
    for h in tl.static_range(HEADS):
        o_q, m_q = head_queries(i_b * HEADS + h, 0, G, D, BD, BG)
        b_q = tl.load(p_queries + o_q, mask=m_q, other=0.0)
        b_p = tl.load(p_before + o_q, mask=m_q, other=0.0)
        turned = tl.sum(cosines(b_q.to(tl.float32), b_p.to(tl.float32)), 0) / G < threshold
        tl.debug_barrier()  # another thread may have read what this one writes
        tl.store(p_before + o_q, b_q, mask=m_q)
        tl.store(p_fire + i_b * HEADS + h, (turned | ((fresh & UNKNOWN) != 0)).to(tl.int32))
    tl.store(p_fresh + i_b, 0)


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
            launch(turned_kernel, (slots,))(
                queries, self.before, self._fresh, self.fire, self.threshold, D=dim, BD=padded,
                BG=next_power_of_2(self._heads // self._width), G=self._heads // self._width, HEADS=self._width, num_warps=4,
            )  # fmt: skip
            return
        semantic = isinstance(config, SemanticBoundary)
        most = (config.max_stride or _NEVER) if isinstance(config, SemanticBoundary) else _NEVER
        marks = Marks(self._fresh, self._since) if self._marks is None else self._marks
        launch(trigger_kernel, (slots,))(
            queries, self.before, self._since, self._fresh, self.fire, self.searches, marks.marks, marks.ordinals,
            self.threshold, most, config.steps if isinstance(config, FixedStride) else 1, marks.ordinals.stride(0),
            marks.marks.stride(0), D=dim, BD=padded, BH=max(1, min(next_power_of_2(self._heads), _NUMBERS // padded)),
            H=self._heads, WIDTH=self._width, SEMANTIC=semantic,
            LAST=isinstance(config, SemanticBoundary) and config.compare == "retrieval", MARKS=self._marks is not None,
            num_warps=4 if semantic else 1, **overlapping(queries.device),
        )  # fmt: skip

    def join(self, trigger: Trigger, slots: list[int], sequences: Collection[int]) -> None:
        """Takes over the state of a host trigger whose sequences are in these slots; counters start at 0. sequences:
        those that have a selection."""
        for b, slot in enumerate(slots):
            fresh = 0 if b in sequences else MISSING.value
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

"""The zone lengths of the sequences in slots, as kernels read them.

Either the host counts (`PlannedZones`) and sends one row of numbers per slot before each step, or the device does
(`DeviceZones`): for units, which grow within the step, and if queries decide what leaves the window, as with segments.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from kvrecall.cache.zones import ZoneLengths, ZoneSizes
from kvrecall.core.structs import sent_integers

ZONE_NUMBERS = 7
"""int32 numbers of a row of `DeviceZones`; see `cache.slot_kernels`."""
STEP, TRIAL, IDLE = 0, 1, 2
"""Kinds of steps. TRIAL: nothing leaves the window. IDLE: a slot without a sequence, nothing is stored."""


class ZonePlan(ABC):
    """Zone lengths of the sequences in slots, counted by the host for all layers that share the plan."""

    zones: dict[int, ZoneLengths]
    """By slot, before the next step; None without a sequence."""
    row: int
    """int32 numbers per slot."""
    spare: int
    """Tokens of a step beyond its first."""

    @abstractmethod
    def rows(self, quiet: bool = False, ahead: int = 0) -> Tensor:
        """int32 `[slots, row]` on the CPU, for the next step. quiet: for a trial step, in which nothing leaves the window.
        ahead: for a token of the step that has so many before it, none of which makes a zone grow."""

    @abstractmethod
    def until_growth(self, slot: int) -> int:
        """How many further tokens of a sequence there are until one makes its retrieval zone grow, that one included."""

    @abstractmethod
    def attended(self, slot: int) -> int:
        """Tokens outside the retrieval zone that the next step attends to, its own included."""

    @abstractmethod
    def advance(self) -> None:
        """Called after a step."""


class SlotZones(ABC):
    """The zones of one layer's slots."""

    rows: Tensor
    """int32 `[·, ·]` on the device, read by kernels."""

    @abstractmethod
    def join(self, slot: int, zones: ZoneLengths, front: int) -> None:
        """Gives a slot to a sequence. front: rows before its window, sink and static set."""

    @abstractmethod
    def leave(self, slot: int) -> None:
        """Frees a slot: its token attends to itself, and nothing is stored."""

    @abstractmethod
    def lengths(self, slots: list[int]) -> list[ZoneLengths]:
        """Zone lengths before the next step; synchronises if the device counts."""

    @abstractmethod
    def attended(self, slots: list[int], steps: int) -> int:
        """Tokens outside selection and static set that these sequences attended to in the `steps` steps since they joined."""

    @abstractmethod
    def on_host(self, zones: ZoneLengths) -> int:
        """How many of a window's oldest tokens must be in their host rows before a step."""

    def begin_trial(self, slots: list[int]) -> None:  # noqa: B027 - optional: a plan has trials of its own
        """Makes the next step a trial."""

    def moved_on(self, slots: list[int]) -> None:  # noqa: B027 - optional: a device counts for itself
        """Called after a step that the plan has not counted yet."""


class PlannedZones(SlotZones):
    """The host counts. Tokens of the buffer are copied to the host one per step."""

    def __init__(self, plan: ZonePlan, rows: Tensor) -> None:
        """rows: int32 `[slots, plan.row]` on the device, filled before each step by the owner of the plan."""
        self.plan, self.rows = plan, rows
        self._attended: dict[int, int] = {}

    def join(self, slot: int, zones: ZoneLengths, front: int) -> None:
        self._attended[slot] = 0

    def leave(self, slot: int) -> None:
        self._attended.pop(slot, None)

    def lengths(self, slots: list[int]) -> list[ZoneLengths]:
        return [self.plan.zones[slot] for slot in slots]

    def attended(self, slots: list[int], steps: int) -> int:
        return sum(self._attended[slot] for slot in slots)

    def on_host(self, zones: ZoneLengths) -> int:
        return zones.buffer

    def moved_on(self, slots: list[int]) -> None:
        for slot in slots:
            self._attended[slot] += self.plan.attended(slot)


class DeviceZones(SlotZones):
    """The kernel that ends a step counts; if lengths alone decide, so does the host, which then need not ask. Every token is in
    its host row from its own step on."""

    def __init__(
        self, slots: int, heads: int, sizes: ZoneSizes, tokens: int, front: int, ring: int, device: torch.device, counts: bool
    ) -> None:
        """tokens: most tokens after the sink. front: most rows before the window. ring: most rows of the window. counts:
        whether the host counts too; not if tokens leave the window by segments, whose ends only the device knows."""
        self._by_slot, self._sizes, self._front, self._ring = (slots, heads, ZONE_NUMBERS), sizes, front, ring
        self.rows = torch.zeros(slots * heads, ZONE_NUMBERS, dtype=torch.int32, device=device)
        """int32 `[slots * H_kv, ZONE_NUMBERS]`; all KV heads of a slot have the same row."""
        self.marks = torch.zeros(slots, tokens + 1, dtype=torch.uint8, device=device)
        """uint8 `[slots, tokens + 1]`, by number after the sink: not 0 for tokens that begin a segment."""
        self.resident = torch.zeros(slots, dtype=torch.int64, device=device)
        """int64 `[slots]`: window rows that the steps have attended to."""
        self._counts = counts
        self._counted: dict[int, tuple[ZoneLengths, int]] = {}
        """By slot, if the host counts: the zones before the next step, and how many window rows the steps have attended to."""
        for slot in range(slots):
            self.leave(slot)

    @property
    def token_numbers(self) -> Tensor:
        """int32 `[slots]`, strided: the numbers of the tokens of the next step."""
        return self.rows.view(self._by_slot)[:, 0, 5]

    @property
    def retrieval(self) -> Tensor:
        """int32 `[slots]`, strided: the lengths of the retrieval zones."""
        return self.rows.view(self._by_slot)[:, 0, 4]

    def join(self, slot: int, zones: ZoneLengths, front: int) -> None:
        window = zones.local + zones.buffer
        token = zones.retrieval + window
        oldest, newest = (number % self._ring for number in (zones.retrieval, token))
        self._set(slot, [front, window + 1, oldest, self._front + newest, zones.retrieval, token, STEP])
        self.resident[slot].zero_()  # to assign a number is a copy that waits
        self.marks[slot] = 0
        if self._counts:
            self._counted[slot] = zones, 0

    def leave(self, slot: int) -> None:
        self._counted.pop(slot, None)
        self._set(slot, [0, 1, 0, self._front, 0, 0, IDLE])

    def lengths(self, slots: list[int]) -> list[ZoneLengths]:
        if self._counts:
            return [self._counted[slot][0] for slot in slots]
        rows = self.rows.view(self._by_slot)[slots][:, 0].tolist()
        sink = self._sizes.sink_tokens
        return [self._sizes.lengths(sink + token, first) for _, _, _, _, first, token, _ in rows]

    def attended(self, slots: list[int], steps: int) -> int:
        window = sum(self._counted[slot][1] for slot in slots) if self._counts else int(self.resident[slots].sum())
        return window + len(slots) * self._sizes.sink_tokens * steps

    def moved_on(self, slots: list[int]) -> None:
        for slot in slots if self._counts else ():
            zones, attended = self._counted[slot]
            seen, after = self._sizes.step(zones)
            self._counted[slot] = after, attended + seen.local + seen.buffer

    def on_host(self, zones: ZoneLengths) -> int:
        return zones.local + zones.buffer

    def begin_trial(self, slots: list[int]) -> None:
        self.rows.view(self._by_slot)[slots, :, 6] = TRIAL  # changes of units could not be undone

    def mark(self, slot: int, numbers: Sequence[int]) -> None:
        """Marks tokens, numbered from the end of the sink, as beginnings of segments."""
        self.marks[slot, torch.tensor(numbers, dtype=torch.int64, device=self.marks.device)] = 1

    def marked(self, slot: int, start: int, stop: int) -> list[int]:
        """Tokens of start .. stop - 1 that begin a segment; synchronises."""
        return (start + self.marks[slot, start:stop].nonzero().flatten()).tolist()

    def _set(self, slot: int, row: list[int]) -> None:
        self.rows.view(self._by_slot)[slot] = sent_integers(row, self.rows.device)

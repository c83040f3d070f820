"""An index's part of a device step: its summaries in slots of fixed addresses, and the launches that search them.

The layer (`layer/slots/search.py`) holds windows, trigger and zones; the index adds what depends on its summaries. A step
launches kernels, or calls torch functions of fixed sizes, and never waits for the device. So it can be recorded once and
replayed.
"""

# Kernel launches take arguments that type checkers do not know.
# pyright: reportCallIssue=false

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from kvrecall.cache.slot_zones import DeviceZones, SlotZones, ZonePlan
from kvrecall.cache.zones import ZoneLengths, ZoneSizes
from kvrecall.core.launch import launch, next_power_of_2, overlapping
from kvrecall.core.structs import AttentionParams, HostTable
from kvrecall.index.base import Index, LayerShape
from kvrecall.select.queries import QueryRing

if TYPE_CHECKING:
    from kvrecall.attend.step import StepAttention


class Estimates(Protocol):
    """Estimates of the tokens that a search did not find, as parts of the same merge."""

    parts: int

    def attend(
        self, queries: Tensor, ids: Tensor, out: Tensor, lse: Tensor, first: int, params: AttentionParams, pairs: range
    ) -> None:
        """Fills the parts from `first` on, for `pairs` of slots and KV heads."""


@dataclass(frozen=True)
class SlotSpec:
    """What an index needs to make its part of a step.

    shape: of the layer, with one sequence per slot. tokens: most tokens after the sink. top_k: most tokens that a search
    finds. host: the rows on the host, and int32 `[slots, W]`, the blocks of each slot's sequence. plan: of the zones, None
    if the device counts. early: whether a search with the queries of the step before comes first. every_step: whether every
    step searches. longest_segment: most tokens of a segment, 0 without segments. estimates: attended to besides the selection.
    """

    shape: LayerShape
    sizes: ZoneSizes
    tokens: int
    top_k: int
    host: HostTable
    plan: ZonePlan | None
    early: bool
    every_step: bool
    longest_segment: int
    estimates: Estimates | None = None

    @property
    def slots(self) -> int:
        """The number of slots."""
        return self.shape.sequences

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.shape.query_heads // self.shape.kv_heads


@dataclass(frozen=True)
class SlotStep:
    """The input of one step of all slots.

    queries `[slots, H_q, 1, D]`, keys, values `[slots, H_kv, 1, D]`, contiguous. now: int64 `[1]`, the step's number, > 0.
    fire: int32 `[slots, width]`, whether to search. attention: rows of the windows, and the parts of the merge. log and
    lse fp32 `[slots, H_q]` receive queries and the log-sum-exp of their attention, if a static set needs them.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    params: AttentionParams
    now: Tensor
    fire: Tensor
    zones: SlotZones
    attention: StepAttention
    log: QueryRing | None
    lse: Tensor


class IndexStep(ABC):
    """Summaries of all slots, and the launches that search them. A subclass needs `search`, `join` and `fits`. It may summarise
    tokens when they come, or when they leave the window."""

    ids: Tensor
    """int32 `[slots, H_kv, K]`: the current selections, ascending, padded with -1."""
    counts: Tensor
    """int32 `[slots, H_kv]`: how many ids of each are valid."""
    width = 1
    """Flags of the trigger per slot: 1, or one for each KV head."""
    estimated_parts = 0
    """Parts of the merge besides selection and window."""
    spread = False
    """Whether selected rows are read by as many programs as possible."""

    def __init__(self, spec: SlotSpec) -> None:
        self.spec = spec

    @abstractmethod
    def fits(self, index: Index, zones: list[ZoneLengths], room: int) -> bool:
        """Whether sequences with these zones, of an index of this kind, can join for `room` steps."""

    @abstractmethod
    def join(self, slot: int, index: Index, sequence: int, zones: ZoneLengths, window: Tensor, budget: int, room: int) -> None:
        """Gives a slot to a sequence of an index. window: rows `[H_kv, n, 2, D]` of the tokens after the zone, oldest first.
        budget: tokens that a search may find. room: steps to come. May be called again until the first step."""

    @abstractmethod
    def search(self, queries: Tensor, fire: Tensor, zones: SlotZones, scaling: float) -> None:
        """Fills ids and counts of the slots with `fire` not 0, for queries `[slots, H_q, 1, D]` or `[slots, H_q, D]`; the other
        slots keep theirs."""

    def search_early(self, queries: Tensor, fire: Tensor, zones: SlotZones, scaling: float) -> None:
        """As `search`, the first of two in a step."""
        self.search(queries, fire, zones, scaling)

    def step(self, inputs: SlotStep) -> Tensor:
        """Searches where the trigger has fired, attends, and ends the step; `[slots, H_q, 1, D]`."""
        self.search(inputs.queries, inputs.fire, inputs.zones, inputs.params.scaling)
        total = None if inputs.log is None else inputs.lse
        out = inputs.attention.launch(
            inputs.queries, inputs.keys, inputs.values, self.ids, inputs.zones.rows, inputs.now, inputs.params, total
        )
        self.end(inputs)
        return out

    def end(self, inputs: SlotStep) -> None:
        """Stores the step's tokens, and moves tokens out of the window. Here: for an index whose summaries `step`
        has written, or that has none."""
        from kvrecall.cache.slot_kernels import tokens_kernel

        grid = (self.spec.slots * self.spec.shape.kv_heads,)
        args, sizes = end_arguments(self.spec, inputs)
        launch(tokens_kernel, grid)(*args, **sizes)

    def leave(self, slot: int, index: Index, sequence: int, tokens: int, keys: Callable[[], Tensor]) -> None:
        """Updates the index of a sequence after steps: afterwards it covers the first `tokens` tokens of the zone.
        keys: returns the new keys, `[H_kv, n, D]`; only called if there are any. Synchronises."""
        if tokens > index.lengths[sequence]:
            index.append(sequence, keys())

    def forget(self, slot: int, index: Index, sequence: int) -> None:  # noqa: B027 - optional
        """The slot is free: the index may no longer refer to the slot's memory."""

    def lacks(self, slot: int, tokens: int) -> bool:
        """Whether `catch_up` is due before a step over a zone of `tokens` tokens, where the host counts them."""
        return False

    def catch_up(self, slot: int, tokens: int) -> None:  # noqa: B027 - optional
        """Between two steps: adds the new tokens of a zone of `tokens` tokens; their rows are on the host."""

    def estimated(self, slot: int) -> int:
        """Rows that the next step attends to as estimates."""
        return 0


def end_arguments(
    spec: SlotSpec, inputs: SlotStep, tensors: tuple[Tensor, ...] = (), numbers: tuple[int, ...] = ()
) -> tuple[tuple[object, ...], dict[str, object]]:
    """Arguments and sizes of a kernel that ends a step, see `cache.slot_kernels.keep_token`. tensors, numbers: what the index
    adds, behind the sequences' blocks and in front of the window of the log."""
    zones, attention, log, dim = inputs.zones, inputs.attention, inputs.log, spec.shape.head_dim
    assert isinstance(zones, DeviceZones)
    table = attention.table
    logs = (inputs.queries, inputs.lse) if log is None else (log.queries, log.lse)
    args = (
        inputs.queries, inputs.lse, attention.rows, zones.rows, table.pool, table.blocks, *tensors, zones.resident, *logs,
        spec.shape.kv_heads, table.blocks.stride(0), attention.rows.shape[2], attention.front, spec.sizes.local_tokens,
        spec.sizes.update_interval, *numbers, 1 if log is None else log.window,
    )  # fmt: skip
    sizes: dict[str, object] = {
        "BLOCK": table.block_size, "D": dim, "BD": next_power_of_2(dim), "G": spec.group, "LOG": log is not None,
        "num_warps": 4, **overlapping(attention.rows.device),
    }  # fmt: skip
    return args, sizes

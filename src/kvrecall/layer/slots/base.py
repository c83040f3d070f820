"""Base class of the layers of a device step: slots at fixed addresses that sequences join and leave."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kvrecall.cache.device_memory import free_device_bytes
from kvrecall.core.errors import CaptureError
from kvrecall.core.structs import AttentionParams
from kvrecall.layer.state import LayerState


@dataclass(eq=False)
class SlotAssignment:
    """The sequences of one layer state, each in a slot; they join and leave together.

    first: tokens of each retrieval zone when they joined. steps: made since then. begun: how many of
    the sequences have the static set of the coming step.
    """

    state: LayerState
    slots: list[int]
    first: list[int] = field(default_factory=list)
    steps: int = 0
    begun: int = 0

    def begin_static(self) -> None:
        """Prepares the coming step's static sets, as `LayerState.begin_step` does, for sequences that lack them."""
        while self.begun < len(self.slots):
            self.state.begin_static(self.begun)
            self.begun += 1

    def end_static(self) -> None:
        """Takes back the static sets that were prepared for a step that will not be made."""
        for b in range(self.begun):
            self.state.statics.grow_older(b, -1)
        self.begun = 0


class SlotLayer(ABC):
    """One layer's part of a device step: slots of fixed addresses, and the launches that work on all of them.

    A step works on every slot; one without a sequence attends to its own token and changes nothing outside the slot. Sequences
    join and leave between steps, which changes data and no address, so the launches can be replayed for all that come.
    """

    bad: Tensor
    """int32 `[slots]`, not 0 for sequences that were given a key or value that is not finite."""
    early = False
    """Whether `search_early` is part of a step."""

    def __init__(self, like: LayerState, slots: int) -> None:
        """like: a state of the kind that is to join, of any number of sequences."""
        self.shape, self.layer = replace(like.shape, sequences=slots), like.layer
        self.kind, self.memory = kind_of(like), like.store.memory
        """memory: of the rows, held so that it is not freed and its address stays."""
        self.groups: list[SlotAssignment] = []

    @abstractmethod
    def fits(self, state: LayerState, room: int) -> bool:
        """Whether the sequences of a state can join for `room` steps: they have this layer's kind, size and memory."""

    def join(self, group: SlotAssignment, room: int) -> None:
        """Takes over the sequences of a state that fits, into free slots. room: steps that they may make.

        After an error the state is as it was and the slots are free.
        """
        self.groups.append(group)
        try:
            self._join(group, room)
        except BaseException:
            self.groups.remove(group)
            self._forget(group)
            raise

    def leave(self, group: SlotAssignment) -> None:
        """Gives the state back as if the steps had been made uncaptured, and frees the slots; synchronises."""
        if group not in self.groups:
            return
        try:
            if group.steps:
                self._give_back(group)
        finally:
            self.groups.remove(group)
            self._forget(group)

    @abstractmethod
    def _join(self, group: SlotAssignment, room: int) -> None:
        """Fills the slots. It may be called again until the first step: the state is still valid."""

    @abstractmethod
    def _give_back(self, group: SlotAssignment) -> None:
        """Brings the state up to date, as if the steps had been made uncaptured."""

    def _forget(self, group: SlotAssignment) -> None:  # noqa: B027 - optional
        """Called when the group's slots have been freed."""

    def step(self, queries: Tensor, keys: Tensor, values: Tensor, now: Tensor, params: AttentionParams) -> Tensor:
        """The T tokens of a step, each as `pipeline.decode_step`; queries `[slots, H_q, T, D]`, keys, values `[slots, H_kv, T,
        D]`.

        now: int64 `[T]` or `[T, ·]`, the tokens' numbers of all steps, > 0. Launches kernels and asks nothing of the device.
        """
        out = []
        for t in range(queries.shape[2]):
            q, k, v = (x[:, :, t : t + 1].contiguous() for x in (queries, keys, values))
            out.append(self._step(q, k, v, now[t : t + 1], params, t))
        return out[0] if len(out) == 1 else torch.cat(out, 2)

    @abstractmethod
    def _step(self, queries: Tensor, keys: Tensor, values: Tensor, now: Tensor, params: AttentionParams, before: int) -> Tensor:
        """As `step` for one token, with `before` others before it in the step; all contiguous."""

    def search_early(self) -> None:  # noqa: B027 - optional: only a speculative trigger searches twice
        """Searches with the queries of the step before; work that `step` launches on another stream comes after it."""

    def begin_trial(self) -> None:  # noqa: B027 - optional: a trial of most layers leaves nothing that matters
        """The next step is a trial: `forget_trial` must be able to undo all that it changes."""

    def forget_trial(self) -> None:
        """Undoes a step that was a trial."""
        for group in self.groups:
            self._join(group, 0)

    def renew(self) -> None:  # noqa: B027 - optional: most have nothing to do between steps
        """Does what is due only every few steps, behind the work of the current stream: the step before may still run. No step
        need follow. After an error it can be called again.
        """

    def moved_on(self) -> None:
        """A token of the last step was taken."""
        for group in self.groups:
            group.steps += 1

    def settle(self, taken: int, fed: int) -> None:  # noqa: B027 - optional
        """After a step of `fed` tokens, of which the first `taken` were taken: forgets the others."""


def kind_of(state: LayerState) -> tuple[object, ...]:
    """What a layer's launches depend on, apart from its sequences. States of one kind can share a step."""
    shape = state.shape
    sizes = shape.query_heads, shape.kv_heads, shape.head_dim, shape.dtype, shape.device, shape.zone_start
    return state.layer, state.method, *sizes


def require_pinned(state: LayerState) -> None:
    """Raises CaptureError if the GPU cannot read the rows in host memory directly, as captured steps do."""
    if state.shape.device.type == "cuda" and not state.store.memory.pinned:
        raise CaptureError("the system refused to pin host memory", "Raise the locked-memory limit (`ulimit -l`).")


_CACHE_SHARE, _LEAST_SHARE = 16, 4
"""The row caches of all layers take at most 1 / `_CACHE_SHARE` of the free memory, with the fewest rows 1 / `_LEAST_SHARE`."""
_LEAST_ROWS, _MOST_ROWS = 2, 8
"""Rows of a row cache, in times of the budget."""


def cache_times(states: list[LayerState], slots: int) -> int:
    """Rows that the row caches of captured steps keep per slot and KV head, in times of the budget; 0: none. states: of all
    layers."""
    device = states[0].shape.device
    need = slots * sum(state.top_k * state.shape.token_bytes for state in states if state.index is not None)
    free = free_device_bytes(device) // max(1, need)
    times = min(_MOST_ROWS, free // _CACHE_SHARE)
    return times if times >= _LEAST_ROWS else _LEAST_ROWS if free >= _LEAST_ROWS * _LEAST_SHARE else 0


def rows_kept(state: LayerState, times: int) -> int:
    """Rows per KV head in a layer's row cache. Some methods want one, or none."""
    if state.keeps_rows:
        return max(_LEAST_ROWS, times) * state.top_k
    return 0 if state.method.fetch_config().reuse is False else times * state.top_k

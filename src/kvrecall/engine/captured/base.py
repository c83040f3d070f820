"""What the layers of a captured decode have in common: how the decoder calls them, and what they count."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from kvrecall.backends.transformers.memory import free_device_bytes
from kvrecall.core.errors import CaptureError
from kvrecall.core.structs import AttentionParams
from kvrecall.layer.state import LayerState


class CapturedState(ABC):
    """Takes over the state of one layer, runs steps on it, and gives it back in `finish`."""

    bad: Tensor
    """int32 `[B]`, not 0 for sequences that were given a key or value that is not finite."""

    def __init__(self, state: LayerState) -> None:
        self.state = state

    @abstractmethod
    def step(self, queries: Tensor, keys: Tensor, values: Tensor, parity: Tensor, params: AttentionParams) -> Tensor:
        """One token per sequence, as `pipeline.decode_step`; queries `[B, H_q, 1, D]`, keys, values `[B, H_kv, 1, D]`.

        parity: int64 `[1]`, the step's number modulo 2. Launches kernels and asks nothing of the device.
        """

    def search_early(self) -> None:  # noqa: B027 - optional: only a speculative trigger searches twice
        """Searches with the queries of the step before; what `step` does on another stream comes after it."""

    @property
    def early(self) -> bool:
        """Whether `search_early` is part of a step."""
        return False

    def begin_trial(self) -> None:  # noqa: B027 - optional: a trial of most layers leaves nothing that matters
        """The next step is a trial: it must change nothing that `forget_trial` cannot bring back."""

    @abstractmethod
    def forget_trial(self) -> None:
        """Undoes a step that was a trial."""

    @abstractmethod
    def finish(self) -> None:
        """Gives the state back as if the steps had been made uncaptured; synchronises."""

    def abandon(self) -> None:  # noqa: B027 - optional: most take nothing from a state before the first step
        """Gives the state back though no step was made."""

    def renew(self) -> None:  # noqa: B027 - optional: most have nothing to do between steps
        """Called before steps, while nothing runs that was captured: does what happens once in many steps.

        After an error it can be called again."""

    def moved_on(self) -> None:  # noqa: B027 - optional: some count by themselves
        """A step was made."""


def require_pinned(state: LayerState) -> None:
    """Raises CaptureError where a GPU cannot read the host's rows where they lie, as every captured step does."""
    if state.shape.device.type == "cuda" and not state.store.pinned:
        raise CaptureError("the system refused to pin host memory", "Raise the locked-memory limit (`ulimit -l`).")


_KEPT_SHARE = 16
"""Rows are kept unasked where those of a layer take no more than this part of the memory that is free."""


def keeps_rows(state: LayerState) -> bool:
    """Whether captured steps keep selected rows for the next one: 4 D H_kv numbers per sequence and token of the budget."""
    if state.keeps_rows or state.method.fetch_config().reuse is not None:
        return state.keeps_rows
    shape = state.shape
    need = 4 * shape.sequences * shape.kv_heads * state.top_k * shape.head_dim * shape.dtype.itemsize
    return need * _KEPT_SHARE <= free_device_bytes(shape.device)


def adopt_held(state: LayerState, ids: Tensor, counts: Tensor) -> None:
    """Writes the selections that uncaptured steps held into ids `[B, H_kv, K]` and counts `[B, H_kv]`."""
    for b, held in state.held.items():
        width = min(held.ids.shape[1], ids.shape[2])
        ids[b] = -1
        ids[b, :, :width] = held.ids[:, :width]
        counts[b] = held.counts


def count_steps(
    state: LayerState, steps: int, *, searches: int, resident: int, selected: int, static: int, read: int, moved: int,
    estimated: int = 0,
) -> None:  # fmt: skip
    """Adds decode steps to a layer's counters.

    resident: tokens attended outside the selection, summed over steps and sequences. selected, static: tokens summed over steps
    and KV heads; read of the selected ones came from the host. moved: tokens that left the window. estimated: groups of tokens
    whose attention was estimated.
    """
    stats, shape = state.stats, state.shape
    row = 2 * shape.head_dim * shape.dtype.itemsize
    stats.steps += steps
    stats.searches += searches
    stats.attended_rows += steps * shape.sequences * shape.kv_heads
    stats.retrieved_tokens += selected
    stats.estimated_units += estimated
    stats.static_tokens += static
    stats.attended_tokens += shape.kv_heads * resident + selected + static
    stats.bytes_fetched += read * row
    stats.bytes_to_device += read * row
    stats.reused_rows += selected - read
    stats.bytes_saved += (selected - read) * row
    stats.bytes_to_host += moved * shape.kv_heads * row

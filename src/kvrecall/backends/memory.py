"""What layers need in device and host memory; out of memory, the layer is unchanged, and the error says how much was needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass

import torch

from kvrecall.cache.device_memory import free_device_bytes
from kvrecall.core.errors import DeviceMemoryError
from kvrecall.index.base import LayerShape
from kvrecall.layer.history import all_of_it, mend
from kvrecall.layer.state import LayerState
from kvrecall.methods.base import Method


@dataclass(frozen=True)
class MemoryPlan:
    """What some layers of one shape need for a number of tokens in each of the shape's sequences.

    zone_tokens: of a sequence's retrieval zone. near_layers: of those that search nothing, whose rows lie on the device.
    window_bytes, summary_bytes: on the device. map_bytes: there, too, shared by all sequences.
    """

    shape: LayerShape
    layers: int
    near_layers: int
    zone_tokens: int
    window_bytes: int
    summary_bytes: int
    map_bytes: int

    @staticmethod
    def of(method: Method, shape: LayerShape, numbers: list[int], tokens: int, room: int | None = None) -> MemoryPlan:
        """numbers: of the layers in the model. room: bytes on the device for everything, which rows of layers without search
        use as far as it goes; None: all rows lie on the host."""
        sizes = method.zone_sizes()
        zone = max(0, tokens - sizes.sink_tokens - sizes.local_tokens)
        searched = [number for number in numbers if method.searches(number)]
        window = shape.token_bytes * sizes.resident_capacity * shape.sequences * len(numbers)
        summaries = shape.sequences * sum(method.at(number).summary_bytes(shape, zone) for number in searched)
        maps, on_device = method.shared_bytes(shape, len(searched), zone), 0
        if room is not None:
            each, left = shape.token_bytes * zone * shape.sequences, room - window - summaries - maps
            on_device = layers_on_device(each, len(numbers) - len(searched), left)
        return MemoryPlan(shape, len(numbers), on_device, zone, window, summaries, maps)

    @property
    def device_token_bytes(self) -> int:
        """A token's rows in the layers whose rows lie on the device."""
        return self.shape.token_bytes * self.near_layers

    @property
    def host_token_bytes(self) -> int:
        """A token's rows in the other layers."""
        return self.shape.host_row_bytes * self.shape.kv_heads * (self.layers - self.near_layers)

    @property
    def zone_bytes(self) -> int:
        """Rows of the retrieval zones of all layers, as on a device."""
        return self.shape.token_bytes * self.layers * self.zone_tokens * self.shape.sequences

    @property
    def growing_bytes(self) -> int:
        """Device memory without rows of the retrieval zone, which can lie on the host."""
        return self.window_bytes + self.summary_bytes

    @property
    def device_bytes(self) -> int:
        """Everything on the device."""
        return self.growing_bytes + self.map_bytes + self.device_token_bytes * self.zone_tokens * self.shape.sequences


@contextmanager
def all_or_nothing(state: LayerState, new: int, uncounted: Callable[[], None]) -> Iterator[None]:
    """Context for a change of a layer by at most `new` tokens per sequence; an error undoes the change.

    uncounted: undoes the owner's bookkeeping; after an error it may be called twice. Raises DeviceMemoryError for
    torch.OutOfMemoryError.
    """
    mend(state)
    tokens = max(state.store.zones(b).total for b in range(state.store.sequences)) + new
    with explained(state.layer, state.shape, state.method, tokens), all_of_it(state, uncounted):
        yield


@contextmanager
def as_before(layers: Iterable[object]) -> Iterator[None]:
    """After an error inside, restores every attribute of these layers. For changes that replace attributes, or entries of
    dictionaries, and write to none."""
    before = [(layer, {name: copy(x) if isinstance(x, dict) else x for name, x in vars(layer).items()}) for layer in layers]
    try:
        yield
    except BaseException:
        for layer, held in before:
            vars(layer).update(held)
        raise


@contextmanager
def explained(layer: int, shape: LayerShape, method: Method, tokens: int) -> Iterator[None]:
    """Turns torch.OutOfMemoryError into DeviceMemoryError, with the bytes of a layer of `tokens` tokens per sequence."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        need = MemoryPlan.of(method, shape, [layer], tokens).growing_bytes
        raise DeviceMemoryError(layer, need, free_device_bytes(shape.device), tokens, shape.device) from error


def check_device(states: list[LayerState], tokens: int) -> None:
    """Raises DeviceMemoryError if a GPU has no room for summaries of `tokens` tokens per sequence; allocates nothing.

    Rows on the device do not count, because they can move to the host."""
    states = [state for state in states if state.index is not None and state.shape.device.type == "cuda"]
    if not states:
        return
    first = states[0]
    free = free_device_bytes(first.shape.device)
    if bytes_to_grow(states, tokens) > free:
        need = sum(_growing_bytes(s, tokens) for s in states)
        raise DeviceMemoryError(first.layer if len(states) == 1 else None, need, free, tokens, first.shape.device)


def bytes_to_grow(states: list[LayerState], tokens: int) -> int:
    """Device bytes that windows and summaries still need for `tokens` tokens per sequence."""
    have = sum(s.store.resident.nbytes + (0 if s.index is None else s.index.nbytes) for s in states)
    return max(0, sum(_growing_bytes(s, tokens) for s in states) - have)


def _growing_bytes(state: LayerState, tokens: int) -> int:
    return MemoryPlan.of(state.method, state.shape, [state.layer], tokens).growing_bytes


def layers_on_device(each: int, layers: int, room: int) -> int:
    """How many of `layers` layers without search fit on a device with `room` bytes for rows, at `each` bytes per layer."""
    return layers if not each else max(0, min(layers, room // each))

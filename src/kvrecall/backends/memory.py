"""Out of memory: the layer is unchanged, and the error says how much was needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import copy

import torch

from kvrecall.cache.device_memory import free_device_bytes
from kvrecall.core.errors import DeviceMemoryError
from kvrecall.index.base import LayerShape
from kvrecall.layer.history import all_of_it, mend
from kvrecall.layer.state import LayerState
from kvrecall.methods.base import Method


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
        need = shape.sequences * layer_bytes(layer, shape, method, tokens)
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
        need = sum(s.shape.sequences * layer_bytes(s.layer, s.shape, s.method, tokens) for s in states)
        raise DeviceMemoryError(first.layer if len(states) == 1 else None, need, free, tokens, first.shape.device)


def bytes_to_grow(states: list[LayerState], tokens: int) -> int:
    """Device bytes that windows and summaries still need for `tokens` tokens per sequence."""
    needs = [s.shape.sequences * layer_bytes(s.layer, s.shape, s.method, tokens) for s in states]
    have = sum(s.store.resident.nbytes + (0 if s.index is None else s.index.nbytes) for s in states)
    return max(0, sum(needs) - have)


def layers_near(each: int, layers: int, room: int) -> int:
    """How many of `layers` layers without search fit on a device with `room` bytes for rows, at `each` bytes per layer."""
    return layers if not each else max(0, min(layers, room // each))


def zone_bytes(shape: LayerShape, method: Method, tokens: int) -> int:
    """Bytes of the retrieval-zone rows of one sequence of one layer, on host or device."""
    sizes = method.zone_sizes()
    return 2 * shape.kv_heads * shape.head_dim * shape.dtype.itemsize * max(0, tokens - sizes.sink_tokens - sizes.local_tokens)


def layer_bytes(layer: int, shape: LayerShape, method: Method, tokens: int) -> int:
    """Device bytes of one sequence of one layer: its window, and its summaries if it is searched. Rows of the retrieval zone
    do not count: they can lie on the host."""
    sizes = method.zone_sizes()
    window = 2 * shape.kv_heads * shape.head_dim * shape.dtype.itemsize * sizes.resident_capacity
    retrieved = max(0, tokens - sizes.sink_tokens - sizes.local_tokens)
    return window + (method.summary_bytes(shape, retrieved) if method.searches(layer) else 0)

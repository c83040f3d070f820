"""What happens when memory runs out: the layer is as it was before, and the error says how much was needed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from kvrecall.cache.host_memory import available_host_bytes
from kvrecall.errors import DeviceMemoryError
from kvrecall.index.base import LayerShape
from kvrecall.layer_state import LayerState
from kvrecall.methods.base import Method


@contextmanager
def all_or_nothing(state: LayerState, new: int) -> Iterator[None]:
    """Inside, a layer stores `new` tokens per sequence and attends; after an error it holds what it held before.

    Raises DeviceMemoryError for torch.OutOfMemoryError.
    """
    before = [state.store.zones(b).total for b in range(state.store.sequences)]
    try:
        with explained(state.layer, state.shape, state.method, max(before) + new):
            yield
    except BaseException:
        state.undo(before)
        raise


@contextmanager
def explained(layer: int, shape: LayerShape, method: Method, tokens: int) -> Iterator[None]:
    """Turns torch.OutOfMemoryError into DeviceMemoryError, with what a layer of `tokens` tokens per sequence takes."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        need = shape.sequences * layer_bytes(layer, shape, method, tokens)
        raise DeviceMemoryError(layer, need, free_device_bytes(shape.device), tokens, shape.device) from error


def layer_bytes(layer: int, shape: LayerShape, method: Method, tokens: int) -> int:
    """Device bytes of one sequence of one layer: its window, and its summaries if it is searched."""
    sizes = method.zone_sizes()
    window = 2 * shape.kv_heads * shape.head_dim * shape.dtype.itemsize * sizes.resident_capacity
    config = None if layer in method.dense_layers else method.index_config()
    return window + (0 if config is None else config.nbytes(shape, max(0, tokens - sizes.sink_tokens - sizes.local_tokens)))


def free_device_bytes(device: torch.device) -> int:
    """Bytes that the device can still give, those included that torch keeps for itself."""
    if device.type != "cuda":
        return available_host_bytes()
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + kept

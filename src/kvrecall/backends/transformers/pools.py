"""One pool of blocks per model and device, which all caches of the model share."""

from __future__ import annotations

from threading import Lock
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from kvrecall.cache.blocks import BlockPool, block_size_on

_pools: WeakKeyDictionary[PreTrainedModel, dict[torch.device, BlockPool]] = WeakKeyDictionary()
_lock = Lock()


def pool_of(model: PreTrainedModel | None, device: torch.device) -> BlockPool:
    """The pool of a model for layers on a device; a new one without a model."""
    if model is None:
        return BlockPool(block_size_on(device))
    with _lock:
        own = _pools.setdefault(model, {})
        if device not in own:
            own[device] = BlockPool(block_size_on(device))
        return own[device]

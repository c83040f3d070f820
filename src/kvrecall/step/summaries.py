"""An engine's pages of a layer, uint8 `[block_bytes]` per block: the summaries of `block_size` tokens for all KV heads
(`index.base.PagedIndex`), then their means, if the method has means (`means.py`)."""

from __future__ import annotations

import torch

from kvrecall.core.errors import ParameterError
from kvrecall.core.launch import kernels_available
from kvrecall.index.base import IndexConfig, LayerShape
from kvrecall.index.page_means import PageMeans
from kvrecall.step.means import bytes_per_token
from kvrecall.step.settings import LEAST_BLOCK


def check_device(device: torch.device) -> None:
    """Raises ParameterError for an unsupported device."""
    if device.type != "cpu" and not kernels_available(device):
        remedy = "Use another attention backend there."
        raise ParameterError("device", "a CPU, or a GPU of compute capability 8.0 on", str(device), remedy)


def width_of(index: IndexConfig, means: PageMeans | None, shape: LayerShape) -> int:
    """Bytes of a layer's page per token and KV head, for any block size."""
    own = index.paged_bytes(shape, LEAST_BLOCK) // (shape.kv_heads * LEAST_BLOCK)
    return own if means is None else own + bytes_per_token(means, shape)

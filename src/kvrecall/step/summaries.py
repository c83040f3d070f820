"""An engine's pages of a layer, uint8 `[block_bytes]` per block: the summaries of `block_size` tokens for all KV heads
(`index.base.PagedIndex`), then their means, if the method has means (`means.py`)."""

from __future__ import annotations

import torch
from torch import Tensor

from kvrecall.core.errors import ParameterError
from kvrecall.core.launch import kernels_available
from kvrecall.index.base import IndexConfig, LayerShape
from kvrecall.index.page_means import PageMeans
from kvrecall.step.means import bytes_per_token
from kvrecall.step.settings import LEAST_BLOCK

_EIGHT_BITS = (8, 9)
"""Least compute capability for e4m3."""
_OWN_DTYPE = "Give the model's own: --kv-cache-dtype bfloat16 or float16. A checkpoint may ask for fp8 itself."


def check_device(device: torch.device) -> None:
    """Raises ParameterError for an unsupported device."""
    if device.type != "cpu" and not kernels_available(device):
        remedy = "Use another attention backend there."
        raise ParameterError("device", "a CPU, or a GPU of compute capability 8.0 on", str(device), remedy)


def check_rows(dtype: torch.dtype | None, device: torch.device) -> None:
    """Raises ParameterError for a device whose kernels do not read rows in this dtype; None: the model's."""
    if dtype is not None and (device.type != "cuda" or torch.cuda.get_device_capability(device) < _EIGHT_BITS):
        wanted = f"the model's dtype, or a GPU of compute capability {'.'.join(map(str, _EIGHT_BITS))} on"
        raise ParameterError("kv_cache_dtype", wanted, f"fp8 on {device}", _OWN_DTYPE)


def scale_of(scales: Tensor) -> float:
    """The scale of a layer's keys or values in eight bits. Raises ParameterError for more than one."""
    if scales.numel() != 1:
        raise ParameterError("kv_cache_dtype", "the model's dtype for scales per head", f"{scales.numel()} scales", _OWN_DTYPE)
    return float(scales)


def width_of(index: IndexConfig, means: PageMeans | None, shape: LayerShape) -> int:
    """Bytes of a layer's page per token and KV head, for any block size."""
    own = index.paged_bytes(shape, LEAST_BLOCK) // (shape.kv_heads * LEAST_BLOCK)
    return own if means is None else own + bytes_per_token(means, shape)

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


def check_device(device: torch.device) -> None:
    """Raises ParameterError for an unsupported device."""
    if device.type != "cpu" and not kernels_available(device):
        remedy = "Use another attention backend there."
        raise ParameterError("device", "a CPU, or a GPU of compute capability 8.0 on", str(device), remedy)


def row_dtype_of(cache_dtype: str, device: torch.device) -> torch.dtype | None:
    """In which a layer's rows are stored, if not in the model's dtype. cache_dtype: vLLM's name of it. Raises ParameterError
    for a device that does not read it."""
    if not cache_dtype.startswith("fp8"):
        return None
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9):
        wanted = "auto; fp8 needs a GPU of compute capability 8.9 on"
        raise ParameterError("kv_cache_dtype", wanted, f"{cache_dtype} on {device.type}", "Leave it out.")
    return torch.float8_e4m3fn


def scale_of(scales: Tensor) -> float:
    """The scale of a layer's keys or values in eight bits. Raises ParameterError for more than one."""
    if scales.numel() != 1:
        remedy = "Leave it out, or serve a checkpoint with one scale per layer."
        raise ParameterError("kv_cache_dtype", "auto for scales per head", f"{scales.numel()} scales", remedy)
    return float(scales)


def width_of(index: IndexConfig, means: PageMeans | None, shape: LayerShape) -> int:
    """Bytes of a layer's page per token and KV head, for any block size."""
    own = index.paged_bytes(shape, LEAST_BLOCK) // (shape.kv_heads * LEAST_BLOCK)
    return own if means is None else own + bytes_per_token(means, shape)

"""One decode step of a whole model with full attention in device memory, captured, by the faster of two backends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from math import nan
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import LlamaForCausalLM

from kvrecall.bench.models import attention_of, let_go, model_of
from kvrecall.integrations.transformers.memory import free_device_bytes

SPARE_BYTES = 1 << 30
"""Left free beside what is known to be needed: activations, workspaces of the kernels, what a graph keeps for itself."""


@dataclass(frozen=True)
class Full:
    """p50 of a step in milliseconds, the backend, GiB of keys and values; nan where they do not fit."""

    p50_ms: float
    backend: str
    device_gib: float


NOT_MEASURED = Full(nan, "not measured", nan)
DOES_NOT_FIT = Full(nan, "out of memory", nan)


@cache
def full_step(shape: str, layers: int | None, context: int, batch: int) -> Full:
    """A step of a new model, which is gone afterwards; measured once, since no configuration changes it.

    Where keys and values do not fit, nothing is allocated; where memory runs out all the same, everything is given back.
    """
    model = model_of(shape, layers, context)
    try:
        if full_bytes(model, context, batch) + SPARE_BYTES > free_device_bytes(model.device):
            return DOES_NOT_FIT
        return time_full(model, context, batch, 20)
    except torch.OutOfMemoryError:
        return DOES_NOT_FIT  # its traceback, which holds keys and values, ends here


def full_bytes(model: LlamaForCausalLM, context: int, batch: int) -> int:
    """Bytes of keys and values of all layers, with room for one token more."""
    c: Any = model.config
    return 2 * batch * c.num_key_value_heads * (context + 1) * c.head_dim * 2 * c.num_hidden_layers


def time_full(model: LlamaForCausalLM, context: int, batch: int, steps: int) -> Full:
    """Appends in place and calls scaled_dot_product_attention with `enable_gqa`. Raises torch.OutOfMemoryError."""
    config: Any = model.config
    shape = (batch, config.num_key_value_heads, context + 1, config.head_dim)
    stores = [torch.randn(2, *shape, device="cuda", dtype=torch.bfloat16) for _ in range(config.num_hidden_layers)]

    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float | None = None, **_: Any
    ) -> Any:
        kept = stores[module.layer_idx]
        kept[0, :, :, context:], kept[1, :, :, context:] = key, value
        out = F.scaled_dot_product_attention(query, kept[0], kept[1], scale=scaling, enable_gqa=True)
        return out.transpose(1, 2).contiguous(), None

    ids = torch.zeros(batch, 1, dtype=torch.int64, device="cuda")

    def forward() -> Tensor:
        return model(input_ids=ids, position_ids=ids + context, use_cache=False).logits

    found: dict[str, float] = {}
    with attention_of(model, attention):
        for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
            with sdpa_kernel(backend), torch.no_grad():
                aside = torch.cuda.Stream()
                aside.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(aside):
                    forward()
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    kept = forward()
                found[backend.name.lower()] = sorted(times_of(graph.replay, steps))[steps // 2]
                del graph, kept
    name = min(found, key=lambda key: found[key])
    gib = sum(store.nbytes for store in stores) / 2**30
    stores.clear()
    let_go()
    return Full(found[name], name, gib)


def times_of(step: Callable[[], object], steps: int) -> list[float]:
    """Milliseconds of every step, measured by events between them."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in pairwise(marks)]

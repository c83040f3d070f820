"""One decode step of a whole model with full attention in device memory, captured, by the faster of two backends."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
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

from benchmarks.gpu_time import Times, percentiles
from benchmarks.models import attention_of, let_go, model_of
from benchmarks.verify import agree, check_compiled
from kvrecall.backends.transformers.capture.compiled import compiled_modules
from kvrecall.backends.transformers.capture.projections import join_projections
from kvrecall.cache.device_memory import free_device_bytes

SPARE_BYTES = 1 << 30
"""Left free beside what is known to be needed: activations, workspaces of the kernels, what a graph keeps for itself."""


@dataclass(frozen=True)
class Full:
    """Percentiles of a step in milliseconds, the backend, GiB of keys and values; nan where they do not fit."""

    p20_ms: float
    p50_ms: float
    p80_ms: float
    backend: str
    device_gib: float


NOT_MEASURED = Full(nan, nan, nan, "not measured", nan)
DOES_NOT_FIT = Full(nan, nan, nan, "out of memory", nan)


@cache
def full_step(shape: str, layers: int | None, context: int, batch: int, compiled: bool = False) -> Full:
    """A step of a new model, which is gone afterwards; measured once, since no configuration changes it.

    compiled: with norms, feed-forward layers and rotary embedding as torch.compile makes them. Where keys and values do not
    fit, nothing is allocated; where memory runs out all the same, everything is given back. Raises CheckError
    where a layer does not attend as in fp32, or a replay is not what the same kernels make, launched one by one.
    """
    model = model_of(shape, layers, context)
    try:
        if full_bytes(model, context, batch) + SPARE_BYTES > free_device_bytes(model.device):
            return DOES_NOT_FIT
        return time_full(model, context, batch, 20, compiled)
    except torch.OutOfMemoryError:
        return DOES_NOT_FIT  # its traceback, which holds keys and values, ends here


def full_bytes(model: LlamaForCausalLM, context: int, batch: int) -> int:
    """Bytes of keys and values of all layers, with room for one token more."""
    c: Any = model.config
    return 2 * batch * c.num_key_value_heads * (context + 1) * c.head_dim * 2 * c.num_hidden_layers


class FullAttention:
    """The model's attention over Gaussian keys and values of `context` tokens and one token more, which each call writes in
    place."""

    def __init__(self, model: LlamaForCausalLM, context: int, batch: int) -> None:
        """Allocates bf16 `[2, B, H_kv, context + 1, D]` per layer on the model's device; raises torch.OutOfMemoryError."""
        c: Any = model.config
        shape = (2, batch, c.num_key_value_heads, context + 1, c.head_dim)
        self._model, self._context = model, context
        self.stores = [torch.randn(shape, device=model.device, dtype=torch.bfloat16) for _ in range(c.num_hidden_layers)]
        self.checked = False
        """Compare every attention with one in fp32, a head at a time, which needs no more memory than a head's keys."""
        self._ids = torch.zeros(batch, 1, dtype=torch.int64, device=model.device)

    def step(self) -> Tensor:
        """Logits `[B, vocabulary]` of the coming token; within `attention_of(model, self)`."""
        return self._model(input_ids=self._ids, position_ids=self._ids + self._context, use_cache=False).logits[:, -1]

    def __call__(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float | None = None, **_: Any
    ) -> Any:
        kept = self.stores[module.layer_idx]
        kept[0, :, :, self._context :], kept[1, :, :, self._context :] = key, value
        out = F.scaled_dot_product_attention(query, kept[0], kept[1], scale=scaling, enable_gqa=True)
        if self.checked:
            exact = exact_attention(query, kept[0], kept[1], scaling)
            agree(f"full attention, layer {module.layer_idx}", out, exact)
        return out.transpose(1, 2).contiguous(), None


def exact_attention(query: Tensor, keys: Tensor, values: Tensor, scaling: float | None) -> Tensor:
    """Queries `[B, H_q, 1, D]` over keys, values `[B, H_kv, N, D]`, in fp32; `[B, H_q, 1, D]` in the queries' dtype."""
    factor = query.shape[-1] ** -0.5 if scaling is None else scaling
    grouped = query[:, :, 0].unflatten(1, (keys.shape[1], -1))  # [B, H_kv, G, D]
    out = torch.empty_like(grouped)
    for b in range(keys.shape[0]):
        for head in range(keys.shape[1]):
            shares = (grouped[b, head].float() @ keys[b, head].float().T * factor).softmax(-1)
            out[b, head] = shares @ values[b, head].float()
    return out.flatten(1, 2).unsqueeze(2)


def time_full(model: LlamaForCausalLM, context: int, batch: int, steps: int, compiled: bool = False) -> Full:
    """Appends in place and calls scaled_dot_product_attention with `enable_gqa`. Raises torch.OutOfMemoryError, and
    CheckError as `full_step` does."""
    if compiled:
        check_compiled(model)
        join_projections(model)  # as retrieval's captured steps do
    attention = FullAttention(model, context, batch)
    found: dict[str, Times] = {}
    with attention_of(model, attention), torch.no_grad():
        for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
            name = backend.name.lower()
            with sdpa_kernel(backend):
                attention.checked = True
                attention.step()
                attention.checked = False
                with compiled_modules(model) if compiled else nullcontext():
                    found[name] = _time(attention, name, steps)
    name = min(found, key=lambda key: found[key][1])
    gib = sum(store.nbytes for store in attention.stores) / 2**30
    attention.stores.clear()
    let_go()
    return Full(*found[name], name, gib)


def _time(attention: FullAttention, name: str, steps: int) -> Times:
    """Captures a step, compares its replay with the same kernels launched one by one, and times it, in milliseconds."""
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        launched = attention.step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = attention.step()
    graph.replay()
    agree(f"full attention, {name}, logits of the replayed step", logits, launched)
    return percentiles(times_of(graph.replay, steps))


def times_of(step: Callable[[], object], steps: int) -> list[float]:
    """Milliseconds of every step, measured by events between them."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in pairwise(marks)]

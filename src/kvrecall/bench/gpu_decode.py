"""A whole model, one decode step, on a GPU: captured decode with retrieval against captured decode with full attention.

    kvrecall bench decode --context 64k,128k [--out FILE]

Weights are random and the cache is filled with Gaussian keys and values: only speed is measured. Every step is fed random
tokens. Full attention keeps K and V in device memory, appends in place and calls scaled_dot_product_attention with `enable_gqa`
(cuDNN or flash, the faster one); its step is captured as a CUDA graph as ours is, so both run the same modules of transformers
with the same launch costs.

Configurations: those of `gpu_layer`; `product-early` and `paper-early`, which search with the query of the step before and
correct the heads that have turned; `prkv`; `louiskv`, whose queries of a random model would say nothing, so that its trigger is
asked at every step but fires at every fifth, with two dense layers; `freekv`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM
from transformers.masking_utils import AttentionMaskInterface

from kvrecall.bench import gpu_layer
from kvrecall.engine.captured.decoder import CapturedDecoder
from kvrecall.integrations.transformers import RetrievalCache
from kvrecall.layer_state import LayerState
from kvrecall.methods.base import Method
from kvrecall.methods.freekv import FreeKV
from kvrecall.methods.louiskv import LouisKV
from kvrecall.methods.prkv import PRKV
from kvrecall.trigger.speculative import Speculative

SHAPES: dict[str, dict[str, int]] = {
    "llama-3.1-8b": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256,
    },
    "qwen3-0.6b": {
        "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    },
}  # fmt: skip
_NAME = "kvrecall-bench-full"
_STRIDE = 5
CONFIGS: dict[str, Callable[[int], Method]] = {
    **gpu_layer.CONFIGS,
    **{
        f"{name}-early": lambda n, name=name: replace(gpu_layer.CONFIGS[name](n), trigger=Speculative())
        for name in ("product", "paper")
    },
    "prkv": lambda _: PRKV(full_attention_threshold=0),
    "louiskv": lambda _: LouisKV(threshold=-1.0, max_stride=_STRIDE, full_attention_threshold=0),
    "freekv": lambda _: FreeKV(full_attention_threshold=0),
}


@dataclass(frozen=True)
class Row:
    """One comparison; milliseconds per decode step, GiB allocated. A side that does not fit has nan."""

    shape: str
    layers: int
    context: int
    batch: int
    config: str
    retrieval_p50_ms: float
    retrieval_p80_ms: float
    retrieval_worst_ms: float
    """The slowest of all steps, those included in which buffers move to the retrieval zone."""
    steps: int
    full_p50_ms: float
    full_backend: str
    speedup: float
    retrieval_device_gib: float
    full_device_gib: float
    host_gib: float


def model_of(shape: str, layers: int | None, context: int) -> LlamaForCausalLM:
    """A decoder with random bf16 weights on the GPU."""
    sizes = SHAPES[shape] | ({} if layers is None else {"num_hidden_layers": layers})
    config = LlamaConfig(**sizes, max_position_embeddings=2 * context, rope_parameters={"rope_theta": 500000.0})  # type: ignore[arg-type]
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)


def fill(cache: RetrievalCache, tokens: int, batch: int, room: int) -> None:
    """Gaussian keys and values for every layer, stored and indexed as a prompt is."""
    made = cache.signature
    cache.reserved_tokens = tokens + room
    for layer in cache.retrieval_layers:
        for b in range(batch):
            keys, values = (
                torch.randn(made.kv_heads, tokens, made.head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(2)
            )
            if layer.state is None:
                layer.lazy_initialization(keys[None, :, :1].expand(batch, -1, -1, -1), values[None, :, :1])
            assert layer.state is not None
            layer.state.absorb(b, layer.state.store.append_chunk(b, keys, values))
            _observe(layer.state, b, tokens)
        layer._logical = tokens


def _observe(state: LayerState, b: int, tokens: int) -> None:
    """Ends the prompt as if its last queries had been seen: some methods judge keys by them."""
    shape, count = state.shape, 1 if state.log is None else min(state.log.window, tokens)
    queries = torch.randn(shape.query_heads, count, shape.head_dim, device=shape.device, dtype=shape.dtype)
    state.saw_prompt(b, queries, torch.zeros(shape.query_heads, count, device=shape.device), tokens - count)


def times_of(step: Callable[[], object], steps: int) -> list[float]:
    """Milliseconds of every step, measured by events between them."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in pairwise(marks)]


def retrieval(model: LlamaForCausalLM, context: int, batch: int, name: str, steps: int) -> tuple[list[float], float, float]:
    """(step times, device GiB beyond the weights, host GiB)."""
    before = torch.cuda.memory_allocated()
    cache = RetrievalCache(model.config, CONFIGS[name](context))
    fill(cache, context, batch, steps + 64)
    decoder = CapturedDecoder(model, cache, steps + 64)
    fed = torch.randint(0, model.config.vocab_size, (steps + 8, batch, 1), device="cuda")
    numbers = iter(fed)

    def step() -> None:
        decoder.input_ids.copy_(next(numbers))
        decoder.step()

    for _ in range(5):
        step()
    times = times_of(step, steps)
    device = torch.cuda.memory_allocated() - before
    decoder.check()
    decoder.close()
    host = cache.stats().total.host_bytes
    return sorted(times), device / 2**30, host / 2**30


def full(model: LlamaForCausalLM, context: int, batch: int, steps: int) -> tuple[float, str, float]:
    """(p50, backend, device GiB beyond the weights) of the faster backend."""
    before = torch.cuda.memory_allocated()
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

    AttentionInterface.register(_NAME, attention)
    AttentionMaskInterface.register(_NAME, lambda *args, **kwargs: None)
    previous = config._attn_implementation or "sdpa"
    model.set_attn_implementation(_NAME)
    ids = torch.zeros(batch, 1, dtype=torch.int64, device="cuda")
    found: dict[str, float] = {}
    try:
        for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
            with sdpa_kernel(backend), torch.no_grad():

                def forward() -> Tensor:
                    return model(input_ids=ids, position_ids=ids + context, use_cache=False).logits

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
    finally:
        model.set_attn_implementation(previous)
        AttentionInterface._global_mapping.pop(_NAME, None)
        AttentionMaskInterface._global_mapping.pop(_NAME, None)
    name = min(found, key=lambda key: found[key])
    return found[name], name, (torch.cuda.memory_allocated() - before) / 2**30


def measure(shape: str, layers: int | None, context: int, batch: int, name: str, steps: int) -> Row:
    """Both sides in one process, one after the other."""
    model = model_of(shape, layers, context)
    nan = float("nan")
    try:
        full_ms, backend, full_gib = full(model, context, batch, 20)
    except torch.OutOfMemoryError:
        full_ms, backend, full_gib = nan, "out of memory", nan
    torch.cuda.empty_cache()
    times, device, host = retrieval(model, context, batch, name, steps)
    p50 = times[len(times) // 2]
    count = model.config.num_hidden_layers
    return Row(shape, count, context, batch, name, p50, times[4 * len(times) // 5], times[-1], steps, full_ms, backend,
               full_ms / p50, device, full_gib, host)  # fmt: skip

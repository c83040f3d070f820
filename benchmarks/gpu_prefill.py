"""Reading a prompt on a GPU: plain prefill of transformers, the same through kvrecall, and what of it the index costs.

    python -m benchmarks prefill --context 128k --layers 2 --configs product,paper,balanced [--out FILE]

Weights and tokens are random. Plain prefill is the model's own modules over a DynamicCache, chunk by chunk, by the faster of
two attentions that know grouped heads: flash with a causal mask aligned with the last key, and cuDNN, whose mask is aligned by
the first one, so that it attends to the cached keys and to the chunk's own apart, and both are merged. The other side is
`engine.prefill` in chunks of the same size, with keys and values in host memory. Both leave the head of the model out.

The index is what retrieval adds for itself: `encode_s`, summarising keys as they come, and `settle_s`, what is done at the end
of a prompt (clusters, which read keys back from the host). The first is the time of the GPU's stream, in a
pass of its own with events around each stage, the second what the host waits for; `build_share` is their sum over the seconds
of plain prefill. In the same pass `offload_s` is what the stream waits while rows are made ready for the host, where
page-locking memory for the first time (`pin_s`, measured apart) keeps the host from asking for more work.

Layers are alike, and outside of them there is but an embedding and a norm: the share of two layers is the share of all. What
`plain_s` and `retrieval_s` say in seconds is of as many layers as the row says.

Nothing is timed before the last chunk's hidden states agree on both sides and each layer's index holds exactly its zone.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from math import nan
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from transformers import DynamicCache, LlamaForCausalLM

from benchmarks.checks import require
from benchmarks.gpu_layer import in_eight_bits
from benchmarks.gpu_time import percentiles
from benchmarks.models import attention_of, method_of, model_of
from kvrecall.backends.transformers import RetrievalCache
from kvrecall.backends.transformers.cache_name import cache_argument
from kvrecall.cache.layer import LayerStore
from kvrecall.engine.prefill import prefill
from kvrecall.layer.state import LayerState

TOLERANCE = 0.03
"""Largest relative difference of hidden states. Both sides round to bf16 in other orders, which makes 0.005 to 0.011 of models
up to 4,096 wide, hardly more with more layers; attention that misses 64 of 2,048 tokens makes 0.24."""
SMALL_TOLERANCE = 0.1
"""The same with rows in eight bits, which are 3 % off: 0.02 to 0.06."""
_INDEX_STAGES = ("encode", "watch")


@dataclass(frozen=True)
class Row:
    """One comparison, in seconds for all layers together; the median of passes, but for the stages (see the module)."""

    shape: str
    layers: int
    context: int
    chunk_tokens: int
    config: str
    plain_s: float
    plain_backend: str
    retrieval_s: float
    encode_s: float
    settle_s: float
    index_s: float
    build_share: float
    index_us_per_1k_tokens: float
    """Per layer and 1,000 tokens of the retrieval zone."""
    offload_s: float
    pin_s: float
    hidden_error: float
    """Relative difference of the last chunk's hidden states on both sides."""
    plain_p20_s: float
    """Percentiles of the passes, where there are at least three."""
    plain_p80_s: float
    retrieval_p20_s: float
    retrieval_p80_s: float


Attention = Callable[[Tensor, Tensor, Tensor, float | None], Tensor]
"""(queries `[B, H_q, T, D]`, keys, values `[B, H_kv, n, D]`, scaling) -> `[B, H_q, T, D]`; the last query sees every key."""


def flash(queries: Tensor, keys: Tensor, values: Tensor, scaling: float | None) -> Tensor:
    """One call of the flash kernel."""
    mask = causal_lower_right(queries.shape[2], keys.shape[2])
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scaling, enable_gqa=True)


def cudnn(queries: Tensor, keys: Tensor, values: Tensor, scaling: float | None) -> Tensor:
    """Two calls of cuDNN's kernel behind cached keys, one where there are none."""
    past = keys.shape[2] - queries.shape[2]

    def part(some: slice, causal: bool) -> tuple[Tensor, Tensor]:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            queries, keys[:, :, some], values[:, :, some], None, past > 0, 0.0, causal, scale=scaling
        )
        return out, lse

    out, lse = part(slice(past, None), True)
    if not past:
        return out
    before, before_lse = part(slice(past), False)
    share = torch.sigmoid(before_lse - lse).reshape(*out.shape[:3], 1)
    return torch.lerp(out, before, share.to(out.dtype))


BACKENDS: dict[str, Attention] = {"flash_attention": flash, "cudnn_attention": cudnn}


@torch.inference_mode()
def plain_prefill(model: LlamaForCausalLM, ids: Tensor, chunk_tokens: int, attend: Attention) -> Tensor:
    """Reads `[1, T]` tokens with full attention; hidden states of the last chunk."""
    cache, hidden = DynamicCache(config=model.config), torch.empty(0)

    def attention(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float | None = None, **_: Any) -> Any:
        return attend(q, k, v, scaling).transpose(1, 2).contiguous(), None

    with attention_of(model, attention):
        for chunk in ids.split(chunk_tokens, 1):
            hidden = model.base_model(input_ids=chunk, **cache_argument(cache), use_cache=True).last_hidden_state
    return hidden


class Prompt:
    """A model, a prompt, and the plain prefill of it: seconds of its passes, backend, hidden states of the last chunk."""

    def __init__(self, shape: str, layers: int | None, context: int, chunk_tokens: int, repeats: int, device: str) -> None:
        self.model = model_of(shape, layers, context, device)
        self.chunk_tokens, self.repeats = chunk_tokens, repeats
        generator = torch.Generator().manual_seed(context)
        self.ids = torch.randint(0, self.model.config.vocab_size, (1, context), generator=generator).to(device)
        self.short = self.ids[:, : 2 * chunk_tokens]
        found: dict[str, tuple[list[float], str, Tensor]] = {}
        for name, attend in BACKENDS.items():
            try:
                plain_prefill(self.model, self.short, chunk_tokens, attend)  # compiles and chooses kernels
                hidden = torch.empty(0)
                times = []
                for _ in range(repeats):
                    with self.clock(times):
                        hidden = plain_prefill(self.model, self.ids, chunk_tokens, attend)
                found[name] = times, name, hidden.float()
            except RuntimeError as error:
                print(f"  {name}: {str(error).splitlines()[0][:100]}")
        self.times, self.backend, self.hidden = min(found.values(), key=lambda x: median(x[0]))
        self.plain_s = median(self.times)

    @contextmanager
    def _timed(self, times: list[float]) -> Any:
        self._wait()
        start = time.perf_counter()
        yield
        self._wait()
        times.append(time.perf_counter() - start)

    def clock(self, times: list[float]) -> AbstractContextManager[None]:
        """Appends the seconds of the block, which begins and ends with an idle GPU."""
        gc.collect()  # caches of the pass before; torch keeps their device memory for this one
        return self._timed(times)

    def read(self, name: str, ids: Tensor, profile: bool = False) -> tuple[RetrievalCache, Tensor]:
        """Reads tokens through kvrecall; the cache, and hidden states of the last chunk."""
        model, last = self.model, [torch.empty(0)]
        rows = "fp8" if in_eight_bits(name) else "plain"
        cache = RetrievalCache(model.config, method_of(name, ids.shape[1]), profile=profile, host_rows=rows)
        hook = model.base_model.register_forward_hook(lambda _, __, out: last.__setitem__(0, out.last_hidden_state))
        try:
            prefill(model, ids, cache, chunk_tokens=self.chunk_tokens)
        finally:
            hook.remove()
        return cache, last[0]

    def _wait(self) -> None:
        if self.ids.is_cuda:
            torch.cuda.synchronize()


_prompt = lru_cache(maxsize=1)(Prompt)


def measure(
    shape: str, layers: int | None, context: int, chunk_tokens: int, name: str, repeats: int = 3, device: str = "cuda"
) -> Row:
    """Checks and times one configuration."""
    prompt = _prompt(shape, layers, context, chunk_tokens, repeats, device)
    _settle(prompt, prompt.read(name, prompt.short)[0])  # compiles
    times: list[float] = []
    for _ in range(repeats):  # the first of them makes what a model's prompts share, which no longer counts below
        with prompt.clock(times):
            kept = prompt.read(name, prompt.ids)
        del kept  # to give page-locked memory back takes as long as a tenth of the prompt
    cache, hidden = prompt.read(name, prompt.ids, profile=True)
    settle_s = _settle(prompt, cache)
    states = _states(cache)
    error = _check(prompt, states, hidden, SMALL_TOLERANCE if in_eight_bits(name) else TOLERANCE)
    stages = cache.stats().total.counters.stage_seconds
    encode_s, zone = sum(stages.get(stage, 0.0) for stage in _INDEX_STAGES), states[0].store.zones(0).retrieval
    pin_s = _pin(prompt, states)
    del cache, states
    index_s, count = encode_s + settle_s, prompt.model.config.num_hidden_layers
    return Row(
        shape, count, context, chunk_tokens, name, prompt.plain_s, prompt.backend, median(times), encode_s, settle_s, index_s,
        index_s / prompt.plain_s, index_s / count / zone * 1e9, stages["update"], pin_s, error,
        *_edges(prompt.times), *_edges(times),
    )  # fmt: skip


def _edges(times: list[float]) -> tuple[float, float]:
    """(p20, p80) of passes, nan of fewer than three."""
    p20, _, p80 = percentiles(times)
    return (p20, p80) if len(times) > 2 else (nan, nan)


def _states(cache: RetrievalCache) -> list[LayerState]:
    return [layer.state for layer in cache.retrieval_layers if layer.state is not None]


def _settle(prompt: Prompt, cache: RetrievalCache) -> float:
    """Seconds of what is left to do for the indexes before the first search."""
    times: list[float] = []
    with prompt.clock(times):
        for state in _states(cache):
            state.end_prompts([0], coming=1)
    return times[0]


def _pin(prompt: Prompt, states: list[LayerState]) -> float:
    """Seconds of page-locking as much host memory as the layers have."""
    times: list[float] = []
    shape, table, sizes = states[0].shape, states[0].store.ensure_blocks(1), states[0].store.sizes
    stores = [LayerStore(1, shape.kv_heads, shape.head_dim, shape.dtype, prompt.ids.device, sizes) for _ in states]
    with prompt.clock(times):
        for store in stores:
            store.ensure_blocks(table.blocks.shape[1] * table.block_size)
    return times[0]


def _check(prompt: Prompt, states: list[LayerState], hidden: Tensor, tolerance: float) -> float:
    """The relative difference of hidden states; raises where it is too large or an index does not hold its zone."""
    for state in states:
        sizes, stored = state.store.sizes, state.store.zones(0)
        expected = prompt.ids.shape[1] - sizes.sink_tokens - sizes.local_tokens
        told = f"layer {state.layer}: {stored.retrieval} tokens on the host, not {expected}"
        require(stored.retrieval == expected, told)
        if state.index is not None:
            indexed = state.index.lengths[0]
            require(indexed == expected, f"layer {state.layer}: {indexed} tokens indexed, not {expected}")
    error = float((hidden.float() - prompt.hidden).norm() / prompt.hidden.norm())
    require(error < tolerance, f"hidden states differ by {error:.4f} of their norm, more than {tolerance}")
    return error

"""Memory plan for vLLM with kvrecall, before anything is loaded, with the same numbers as the worker's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache, PretrainedConfig
from transformers.cache_utils import DynamicLayer

from kvrecall.backends.transformers.families import ModelSignature
from kvrecall.core.errors import ParameterError
from kvrecall.index.base import LayerShape
from kvrecall.step.capacity import Capacity, ahead_of, scratch_bytes
from kvrecall.step.settings import BLOCK_TOKENS, Settings

UTILIZATION = 0.9
"""vLLM's default share of a GPU."""
_PASSES, _PASSES_WITH_DRAFTS = 2, 1
"""Passes in flight with asynchronous scheduling, vLLM's default, and without, which vLLM takes with drafts from the text."""


@dataclass(frozen=True)
class VllmPlan:
    """Bytes and blocks of one rank. `*_per_token` sum over its layers and KV heads.

    page_bytes: device memory for pages, after weights and scratch; without the memory of vLLM's own passes. None without a GPU
    and without a given value. blocks: the smaller of what host and device hold. needed_blocks: for one sequence of the context;
    an engine with fewer does not start. sequences: of this context that can decode together. host_bytes, device_bytes: of
    `batch` such sequences; host_bytes for all ranks.
    """

    method: str
    context_tokens: int
    batch: int
    num_speculative_tokens: int
    ranks: int
    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    block_size: int
    host_bytes_per_token: int
    summary_bytes_per_token: float
    block_bytes: int
    block_host_bytes: int
    needed_blocks: int
    host_limit: int
    host_blocks: int
    page_bytes: int | None
    device_blocks: int | None
    blocks: int
    admitted_tokens: int
    sequences: int
    host_bytes: int
    device_bytes: int
    scratch_bytes: int
    weight_bytes: int
    window_page_tokens: int
    fits: bool

    def to_dict(self) -> dict[str, Any]:
        """As a JSON-able dictionary."""
        return asdict(self)


def plan_vllm(
    config: PretrainedConfig, given: Mapping[str, Any], *, context_tokens: int, batch: int = 1, ranks: int = 1,
    dtype: torch.dtype = torch.bfloat16, block_size: int = BLOCK_TOKENS, page_bytes: int | None = None,
    passes: int | None = None, num_speculative_tokens: int = 0,
) -> VllmPlan:  # fmt: skip
    """The plan for `batch` sequences of up to `context_tokens` tokens on `ranks` GPUs by tensor parallelism.

    given: settings of kvrecall's backend, as in vLLM's `additional_config`. page_bytes: device memory for pages; None: 0.9 of
    this machine's GPU minus weights and scratch. passes: in flight; None: vLLM's default. num_speculative_tokens: draft tokens
    per sequence and decode step, as in vLLM's `speculative_config`; 0: no drafts. Raises errors of `kvrecall.core.errors` for
    unsupported settings.
    """
    drafts = num_speculative_tokens
    if drafts < 0:
        raise ParameterError("num_speculative_tokens", "an integer >= 0", drafts, "It is a count; 0 is for none.")
    if passes is None:
        passes = _PASSES_WITH_DRAFTS if drafts else _PASSES
    for name, value in (("context_tokens", context_tokens), ("batch", batch), ("ranks", ranks)):
        if value < 1:
            raise ParameterError(name, "an integer >= 1", value, "It is a count.")
    settings, model = Settings.of({"kvrecall": dict(given)}), ModelSignature.of(config)
    settings.check_drafts(drafts)
    if settings.residency == "device":
        raise ParameterError("residency", "host", "device", "Rows on the device take what full attention takes: plan for that.")
    shapes = _shapes(config, model, ranks, dtype)
    layers, heads = len(shapes), shapes[0].kv_heads
    capacity = Capacity.of(settings, shapes, block_size, context_tokens, passes, ranks, ahead_of(drafts))
    weights = _parameters(config) * dtype.itemsize // ranks
    scratch = scratch_bytes(settings, shapes, batch, context_tokens, block_size, drafts)
    if page_bytes is None and torch.cuda.is_available():
        page_bytes = max(0, int(torch.cuda.mem_get_info()[1] * UTILIZATION) - weights - scratch)
    host_blocks = capacity.host.blocks
    device_blocks = None if page_bytes is None else page_bytes // capacity.device_block_bytes
    blocks = host_blocks if page_bytes is None else capacity.blocks(page_bytes)
    held = batch * (capacity.sequence_blocks + capacity.steady_blocks)
    return VllmPlan(
        settings.method.name, context_tokens, batch, drafts, ranks, layers, heads, model.head_dim,
        str(dtype).removeprefix("torch."), block_size, capacity.host.block_bytes // block_size,
        capacity.device_block_bytes / block_size, capacity.device_block_bytes,
        capacity.host.block_bytes, capacity.needed, capacity.host.limit, host_blocks, page_bytes,
        device_blocks, blocks, blocks * block_size, capacity.sequences(blocks), held * capacity.host.block_bytes * ranks,
        held * capacity.device_block_bytes, scratch, weights, capacity.page_tokens, blocks >= max(capacity.needed, 1 + held),
    )  # fmt: skip


def host_sequences(
    config: PretrainedConfig, settings: Settings, *, context_tokens: int, ranks: int, engines: int, dtype: torch.dtype,
    block_size: int = BLOCK_TOKENS,
) -> int:  # fmt: skip
    """How many sequences of up to `context_tokens` tokens host memory holds for each of `engines` engines of `ranks` GPUs.
    Raises ParameterError as `plan_vllm`."""
    shapes = _shapes(config, ModelSignature.of(config), ranks, dtype)
    capacity = Capacity.of(settings, shapes, block_size, context_tokens, _PASSES, ranks * engines)
    return capacity.sequences(capacity.host.blocks)


def _shapes(config: PretrainedConfig, model: ModelSignature, ranks: int, dtype: torch.dtype) -> list[LayerShape]:
    """Of the layers that kvrecall serves, on one rank."""
    layers = sum(type(layer) is DynamicLayer for layer in DynamicCache(config=config).layers)
    if not layers:
        raise ParameterError("model", "one with full-attention layers", "none", "kvrecall serves such layers.")
    if model.query_heads % ranks:
        raise ParameterError("ranks", f"a divisor of the model's {model.query_heads} query heads", ranks, "vLLM needs it.")
    heads = max(1, model.kv_heads // ranks)
    return [LayerShape(1, model.query_heads // ranks, heads, model.head_dim, dtype, torch.device("cpu"))] * layers


def _parameters(config: PretrainedConfig) -> int:
    """Number of parameters, from the config."""
    with torch.device("meta"):
        return sum(each.numel() for each in AutoModelForCausalLM.from_config(config).parameters())

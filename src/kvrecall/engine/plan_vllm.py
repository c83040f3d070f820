"""What vLLM with our backend will need for a context, before anything is loaded: the same numbers as its worker's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache, PretrainedConfig
from transformers.cache_utils import DynamicLayer

from kvrecall.backends.transformers.signature import ModelSignature
from kvrecall.backends.vllm.capacity import Capacity, scratch_bytes
from kvrecall.backends.vllm.settings import BLOCK_TOKENS, Settings
from kvrecall.core.errors import ParameterError
from kvrecall.index.base import LayerShape

UTILIZATION = 0.9
"""Share of a GPU that vLLM takes, unless it is told another one."""
_PASSES = 2
"""Passes that vLLM has on their way at once: with asynchronous scheduling, its default."""


@dataclass(frozen=True)
class VllmPlan:
    """Bytes and blocks of one rank. `*_per_token` sum over its layers and KV heads.

    page_bytes: device memory for pages, which is what weights and scratch leave; what vLLM's own passes take is not counted.
    None where there is no GPU to ask and nothing was told. blocks: the lesser of what host and device hold. needed_blocks: for
    one sequence of the context; an engine with fewer is refused. sequences: of the context, that decode at once. host_bytes,
    device_bytes: of `batch` such sequences; the former of all ranks.
    """

    method: str
    context_tokens: int
    batch: int
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
        """JSON-able."""
        return asdict(self)


def plan_vllm(
    config: PretrainedConfig, given: Mapping[str, Any], *, context_tokens: int, batch: int = 1, ranks: int = 1,
    dtype: torch.dtype = torch.bfloat16, block_size: int = BLOCK_TOKENS, page_bytes: int | None = None, passes: int = _PASSES,
) -> VllmPlan:  # fmt: skip
    """For sequences of up to `context_tokens` tokens, `batch` at once, on `ranks` GPUs by tensor parallelism.

    given: settings of our backend, as in vLLM's `additional_config`. page_bytes: device memory for pages; None: what weights
    and scratch leave of 0.9 of a GPU here. passes: that vLLM has on their way at once. Raises errors of
    `kvrecall.core.errors` for what is not served.
    """
    for name, value in (("context_tokens", context_tokens), ("batch", batch), ("ranks", ranks)):
        if value < 1:
            raise ParameterError(name, "an integer >= 1", value, "It is a count.")
    settings, model = Settings.of({"kvrecall": dict(given)}), ModelSignature.of(config)
    if settings.residency == "device":
        raise ParameterError("residency", "host", "device", "Rows on the device are vLLM's own way: plan for full attention.")
    layers = sum(type(layer) is DynamicLayer for layer in DynamicCache(config=config).layers)
    if not layers:
        raise ParameterError("model", "one with full-attention layers", "none", "Such layers are what is served.")
    if model.query_heads % ranks:
        raise ParameterError("ranks", f"a divisor of the model's {model.query_heads} query heads", ranks, "vLLM needs it.")
    heads = max(1, model.kv_heads // ranks)
    shape = LayerShape(1, model.query_heads // ranks, heads, model.head_dim, dtype, torch.device("cpu"))
    shapes = [shape] * layers
    capacity = Capacity.of(settings, shapes, block_size, context_tokens, passes, ranks)
    weights = _parameters(config) * dtype.itemsize // ranks
    scratch = scratch_bytes(settings, shapes, batch, context_tokens)
    if page_bytes is None and torch.cuda.is_available():
        page_bytes = max(0, int(torch.cuda.mem_get_info()[1] * UTILIZATION) - weights - scratch)
    host_blocks = capacity.host.blocks
    device_blocks = None if page_bytes is None else page_bytes // capacity.device_block_bytes
    blocks = host_blocks if page_bytes is None else capacity.blocks(page_bytes)
    held = batch * (capacity.sequence_blocks + capacity.steady_blocks)
    return VllmPlan(
        settings.method.name, context_tokens, batch, ranks, layers, heads, model.head_dim, str(dtype).removeprefix("torch."),
        block_size, capacity.host.block_bytes // block_size, capacity.device_block_bytes / block_size,
        capacity.device_block_bytes, capacity.host.block_bytes, capacity.needed, capacity.host.limit, host_blocks, page_bytes,
        device_blocks, blocks, blocks * block_size, capacity.sequences(blocks), held * capacity.host.block_bytes * ranks,
        held * capacity.device_block_bytes, scratch, weights, capacity.page_tokens, blocks >= max(capacity.needed, 1 + held),
    )  # fmt: skip


def _parameters(config: PretrainedConfig) -> int:
    """Numbers of the model, which is not made."""
    with torch.device("meta"):
        return sum(each.numel() for each in AutoModelForCausalLM.from_config(config).parameters())

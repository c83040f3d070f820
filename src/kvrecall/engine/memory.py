"""What a context needs in device and host memory, before anything is allocated, and whether a request fits beside others.

The numbers for vLLM are those of its worker.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from kvrecall.backends.memory import MemoryPlan, bytes_to_grow
from kvrecall.backends.transformers.families import ModelSignature, attending_layers, context_limit
from kvrecall.cache.blocks import block_size_on
from kvrecall.cache.device_memory import SPARE_BYTES, free_device_bytes
from kvrecall.cache.host_memory import available_host_bytes
from kvrecall.core.errors import HostMemoryError, ParameterError
from kvrecall.core.fp8 import check_host_rows
from kvrecall.core.launch import cdiv
from kvrecall.engine.generate_args import GenerateArgs
from kvrecall.engine.prefill import default_chunk_size
from kvrecall.index.base import LayerShape
from kvrecall.methods.base import Method
from kvrecall.step.capacity import Capacity, Division, ahead_of, scratch_bytes
from kvrecall.step.settings import BLOCK_TOKENS, FP8, Settings, row_dtype_of


@dataclass(frozen=True)
class Plan:
    """Bytes of a context under a method, and under full attention. `*_per_token` sum over layers and KV heads.

    weight_bytes: of the model. activation_bytes: about as much as a chunk of a prompt takes besides. available_device_bytes:
    for everything on the GPU; None without one. longest_context: of `batch` sequences that fit, most_sequences: of
    `context_tokens` tokens; both count device and host, and 0 means that the model itself does not fit.
    host_bytes_per_token: of rows, on host or device. device_row_bytes: rows of layers without search on the GPU, as far as they
    fit. host_bytes: the other rows. device_bytes: everything on the device. map_bytes: the maps of the model's keys, shared by
    all sequences (docs/design/statistics.md). session_bytes: of a saved session on disk: whole blocks of rows, window, and
    summaries.
    """

    method: str
    context_tokens: int
    batch: int
    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    weight_bytes: int
    activation_bytes: int
    host_bytes_per_token: int
    summary_bytes_per_token: float
    host_bytes: int
    summary_bytes: int
    map_bytes: int
    resident_bytes: int
    device_row_bytes: int
    device_bytes: int
    full_attention_device_bytes: int
    session_bytes: int
    available_host_bytes: int
    available_device_bytes: int | None
    fits_host: bool
    fits_device: bool | None
    full_attention_fits_device: bool | None
    longest_context: int
    most_sequences: int

    def to_dict(self) -> dict[str, Any]:
        """As a JSON-able dictionary."""
        return asdict(self)


def plan(
    config: PretrainedConfig, *, context_tokens: int, method: Method, batch: int = 1, dtype: torch.dtype = torch.bfloat16,
    host_rows: Literal["plain", "fp8"] = "plain", device_memory: int | None = None, weight_bytes: int | None = None,
) -> Plan:  # fmt: skip
    """Device and host bytes of a cache of `batch` sequences of `context_tokens` tokens, beside the model.

    host_rows: as in `RetrievalCache`. device_memory: of a GPU, for everything; None: what this machine's GPU has free, if it
    has one. weight_bytes: of the weights as they are loaded; None: of the config's numbers in `dtype`.
    """
    check_host_rows(host_rows)
    _check_counts(context_tokens=context_tokens, batch=batch)
    if device_memory is None and torch.cuda.is_available():
        device_memory = torch.cuda.mem_get_info()[0]
    model, host_free = ModelSignature.of(config), available_host_bytes()
    where = torch.device("cpu" if device_memory is None else "cuda")  # decides the block size
    weights = _parameters(config) * dtype.itemsize if weight_bytes is None else weight_bytes

    def shape_of(sequences: int) -> LayerShape:
        small = host_rows == "fp8"
        return LayerShape(sequences, model.query_heads, model.kv_heads, model.head_dim, dtype, where, fp8_rows=small)

    def needed(tokens: int, sequences: int) -> tuple[MemoryPlan, int, int]:
        """Of the cache; bytes of everything on the GPU, 0 without one; and on the host."""
        beside = weights + _activation_bytes(config, shape_of(sequences))
        room = None if device_memory is None else device_memory - beside - SPARE_BYTES
        need = MemoryPlan.of(method, shape_of(sequences), attending_layers(config), tokens, room)
        rows, rest = need.host_token_bytes * need.zone_tokens * sequences, need.device_bytes + beside
        return (need, 0, rows + rest) if device_memory is None else (need, rest, rows)

    def fits(tokens: int, sequences: int) -> bool:
        _, device, host = needed(tokens, sequences)
        return device <= (device_memory or 0) and host <= host_free

    need, device, host = needed(context_tokens, batch)
    per_token, zone, block = need.host_token_bytes + need.device_token_bytes, need.zone_tokens, block_size_on(where)
    full, activations = need.shape.token_bytes * need.layers * context_tokens * batch, _activation_bytes(config, need.shape)
    return Plan(
        method.name, context_tokens, batch, need.layers, model.kv_heads, model.head_dim, str(dtype).removeprefix("torch."),
        weights, activations, per_token, need.summary_bytes // batch / max(1, zone),
        need.host_token_bytes * zone * batch, need.summary_bytes, need.map_bytes, need.window_bytes,
        need.device_token_bytes * zone * batch, need.device_bytes, full,
        per_token * cdiv(zone, block) * block * batch + need.growing_bytes, host_free, device_memory, host <= host_free,
        None if device_memory is None else device <= device_memory,
        None if device_memory is None else full + weights + activations <= device_memory,
        _largest(lambda tokens: fits(tokens, batch), context_limit(config) or _LONGEST),
        _largest(lambda sequences: fits(context_tokens, sequences), _MOST_SEQUENCES),
    )  # fmt: skip


_LONGEST, _MOST_SEQUENCES = 1 << 24, 1024
"""Bounds of what a plan tries."""


def _largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest number up to `most` that fits, as all smaller ones do; 0 if none does."""
    return bisect_left(range(1, most + 1), True, key=lambda number: not fits(number))


def _activation_bytes(config: PretrainedConfig, shape: LayerShape) -> int:
    """About what a chunk of a prompt takes at most: hidden states, a layer's MLP and its attention, with outputs in fp32."""
    text: Any = config.get_text_config(decoder=True)
    tokens = default_chunk_size(shape.device.type, shape.sequences) * shape.sequences
    hidden = text.hidden_size
    wide = getattr(text, "intermediate_size", None) or 4 * hidden
    if experts := getattr(text, "num_experts_per_tok", None):
        wide = max(wide, experts * (getattr(text, "moe_intermediate_size", None) or wide))
    heads = shape.query_heads * shape.head_dim
    return tokens * (shape.dtype.itemsize * (4 * hidden + 3 * wide + 2 * heads) + 4 * 2 * heads)


def _check_counts(**counts: int) -> None:
    for name, value in counts.items():
        if value < 1:
            raise ParameterError(name, "an integer >= 1", value, "It is a count.")


UTILIZATION = 0.9
"""vLLM's default share of a GPU."""
_PAGE_BYTES = 48 << 30
"""Memory for pages where nobody tells it, to estimate the scratch, which grows with the device's memory."""
_PASSES, _PASSES_WITH_DRAFTS = 2, 1
"""Passes in flight with asynchronous scheduling, vLLM's default, and without, which vLLM takes with drafts from the text."""


@dataclass(frozen=True)
class VllmPlan:
    """Bytes and blocks of one rank. `*_per_token` sum over its layers and KV heads.

    page_bytes: device memory for pages and rows, after weights and scratch; without the memory of vLLM's own passes. None
    without a GPU and without a given value. blocks: that it holds, or those that host memory holds: rows of blocks_on_device
    lie in device memory, others in host memory. window_pages: for recent tokens of these others, as large as the rows of a
    block. needed_blocks: for one sequence of the context; an engine with fewer does not start. sequences: of this context that
    can decode together. device_bytes: of summaries and windows of `batch` such sequences, host_bytes: of their rows, for all
    ranks, if none lie in device memory.
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
    kv_cache_dtype: str
    block_size: int
    host_bytes_per_token: int
    summary_bytes_per_token: float
    block_bytes: int
    block_host_bytes: int
    needed_blocks: int
    host_limit: int
    host_blocks: int
    page_bytes: int | None
    blocks_on_device: int
    window_pages: int
    blocks: int
    admitted_tokens: int
    sequences: int
    host_bytes: int
    device_bytes: int
    scratch_bytes: int
    weight_bytes: int
    fits: bool

    def to_dict(self) -> dict[str, Any]:
        """As a JSON-able dictionary."""
        return asdict(self)


def plan_vllm(
    config: PretrainedConfig, given: Mapping[str, Any], *, context_tokens: int, batch: int = 1, ranks: int = 1,
    dtype: torch.dtype = torch.bfloat16, block_size: int = BLOCK_TOKENS, page_bytes: int | None = None,
    passes: int | None = None, num_speculative_tokens: int = 0, kv_cache_dtype: str = "auto", gpu: bool = True,
    weight_bytes: int | None = None,
) -> VllmPlan:  # fmt: skip
    """The plan for `batch` sequences of up to `context_tokens` tokens on `ranks` GPUs by tensor parallelism.

    given: settings of kvrecall's backend, as in vLLM's `additional_config`. page_bytes: device memory for pages and rows; None:
    0.9 of this machine's GPU minus weights and scratch. passes: in flight; None: vLLM's default. num_speculative_tokens: draft
    tokens per sequence and decode step, as in vLLM's `speculative_config`; 0: no drafts. kv_cache_dtype: vLLM's: "auto", which
    is `dtype`, "fp8" or "fp8_e4m3". gpu: False for vLLM on CPUs, whose rows all lie in host memory. weight_bytes: as for
    `plan`, of all ranks. Raises errors of `kvrecall.core.errors` for unsupported settings.
    """
    drafts = num_speculative_tokens
    if drafts < 0:
        raise ParameterError("num_speculative_tokens", "an integer >= 0", drafts, "It is a count; 0 is for none.")
    if passes is None:
        passes = _PASSES_WITH_DRAFTS if drafts else _PASSES
    _check_counts(context_tokens=context_tokens, batch=batch, ranks=ranks)
    settings, model = Settings.of({"kvrecall": dict(given)}), ModelSignature.of(config)
    settings.check_drafts(drafts)
    if kv_cache_dtype not in ("auto", *FP8):
        raise ParameterError("kv_cache_dtype", " or ".join(("auto", *FP8)), kv_cache_dtype, "Leave it out for the model's.")
    shapes = _shapes(config, model, ranks, dtype, kv_cache_dtype)
    layers, heads = len(shapes), shapes[0].kv_heads
    capacity = Capacity.of(settings, shapes, block_size, context_tokens, passes, ranks, ahead_of(drafts), gpu)
    weights = (_parameters(config) * dtype.itemsize if weight_bytes is None else weight_bytes) // ranks
    here = torch.cuda.mem_get_info()[1] if page_bytes is None and torch.cuda.is_available() else None
    memory = (page_bytes or _PAGE_BYTES) + weights if here is None else int(here * UTILIZATION)
    scratch = scratch_bytes(settings, shapes, batch, context_tokens, memory, block_size, drafts)
    if here is not None:
        page_bytes = max(0, memory - weights - scratch)
    host_blocks, held = capacity.host.blocks, batch * capacity.sequence_blocks
    blocks = host_blocks if page_bytes is None else max(0, capacity.most(page_bytes))
    division = Division(0, blocks, 0) if page_bytes is None else capacity.divided(blocks)
    sequences = (blocks - 1) // capacity.sequence_blocks if page_bytes is None else capacity.sequences(blocks)
    device_bytes = held * capacity.device_block_bytes + batch * capacity.steady_blocks * capacity.row_bytes
    return VllmPlan(
        settings.method.name, context_tokens, batch, drafts, ranks, layers, heads, model.head_dim,
        str(dtype).removeprefix("torch."), kv_cache_dtype, block_size, capacity.host.block_bytes // block_size,
        capacity.device_block_bytes / block_size, capacity.device_block_bytes,
        capacity.host.block_bytes, capacity.needed, capacity.host.limit, host_blocks, page_bytes,
        division.on_device, division.windows, blocks, blocks * block_size, max(0, sequences),
        held * capacity.host.block_bytes * ranks, device_bytes, scratch, weights, blocks > held and sequences >= batch,
    )  # fmt: skip


def host_sequences(
    config: PretrainedConfig, settings: Settings, *, context_tokens: int, ranks: int, engines: int, dtype: torch.dtype,
    block_size: int = BLOCK_TOKENS, kv_cache_dtype: str = "auto",
) -> int:  # fmt: skip
    """How many sequences of up to `context_tokens` tokens host memory holds for each of `engines` engines of `ranks` GPUs.
    Raises ParameterError as `plan_vllm`."""
    shapes = _shapes(config, ModelSignature.of(config), ranks, dtype, kv_cache_dtype)
    capacity = Capacity.of(settings, shapes, block_size, context_tokens, _PASSES, ranks * engines)
    return capacity.host.blocks // capacity.sequence_blocks


def _shapes(
    config: PretrainedConfig, model: ModelSignature, ranks: int, dtype: torch.dtype, kv_cache_dtype: str
) -> list[LayerShape]:
    """Of the layers that kvrecall serves, on one rank."""
    layers = len(attending_layers(config))
    if not layers:
        raise ParameterError("model", "one with full-attention layers", "none", "kvrecall serves such layers.")
    if model.query_heads % ranks:
        raise ParameterError("ranks", f"a divisor of the model's {model.query_heads} query heads", ranks, "vLLM needs it.")
    heads = max(1, model.kv_heads // ranks)
    rows, device = row_dtype_of(kv_cache_dtype), torch.device("cpu")
    return [LayerShape(1, model.query_heads // ranks, heads, model.head_dim, dtype, device, row_dtype=rows)] * layers


def _parameters(config: PretrainedConfig) -> int:
    """Number of parameters, from the config."""
    with torch.device("meta"):
        return sum(each.numel() for each in AutoModelForCausalLM.from_config(config).parameters())


def fits(args: GenerateArgs, others: Sequence[GenerateArgs]) -> bool:
    """Whether prompt and answer fit together with what the admitted requests still need."""
    if host_need(args) + sum(map(host_need, others)) > available_host_bytes():
        return False
    device = args.model.device
    if device.type != "cuda":
        return True
    return device_need(args) + sum(map(device_need, others)) <= free_device_bytes(device)


def refuse_too_large(args: GenerateArgs, others: Sequence[GenerateArgs]) -> None:
    """Raises HostMemoryError if the request would not fit on the host even alone."""
    need, available = host_need(args), available_host_bytes()
    held = sum(_host_bytes(each, each.cache.get_seq_length()) for each in others)
    if need > available + held:
        raise HostMemoryError(need, available, args.total_tokens * args.sequences)


def host_need(args: GenerateArgs) -> int:
    """Host bytes that a request still needs. With a GPU, reserved memory counts as used."""
    held = args.cache.get_seq_length()
    if held and args.model.device.type == "cuda" and args.cache.reserved_tokens >= args.total_tokens:
        return 0
    return _host_bytes(args, max(0, args.total_tokens - held))


def device_need(args: GenerateArgs) -> int:
    """GPU bytes that a request's windows and summaries still need."""
    if states := args.cache.states:
        return bytes_to_grow(states, args.total_tokens)
    return plan(
        args.model.config, context_tokens=args.total_tokens, method=args.cache.method, batch=args.sequences,
        dtype=args.model.dtype,
    ).device_bytes  # fmt: skip


def _host_bytes(args: GenerateArgs, tokens: int) -> int:
    return args.cache.host_bytes(tokens, args.sequences, args.model.dtype, args.model.device)

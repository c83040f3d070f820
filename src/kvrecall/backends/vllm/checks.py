"""What of vLLM's options cannot be served. Needs no weights, so it is asked before anything is loaded. Does not import vLLM.

Imports no kernels and no compilers, because it runs where vLLM makes its config (`metrics.py`).
"""

from __future__ import annotations

from typing import Any

from kvrecall.backends.vllm.refused import is_own
from kvrecall.core.errors import CompositionError, ParameterError
from kvrecall.step.settings import BLOCK_TOKENS, FP8, Settings

WORKER = "kvrecall.backends.vllm.worker.Worker"
_DRAFTS = ("ngram", "suffix")
"""Kinds of speculation that look up drafts in the text. Each drafted token is decoded as if alone."""


def drafts_of(vllm_config: Any) -> int:
    """Draft tokens per sequence and decode step."""
    speculation = getattr(vllm_config, "speculative_config", None)
    return 0 if speculation is None else speculation.num_speculative_tokens


def checked(vllm_config: Any) -> Settings:
    """The settings of an engine with this `VllmConfig`. Raises errors of `kvrecall.core.errors` for settings and options that
    do not work."""
    settings, cache = Settings.of(vllm_config.additional_config), vllm_config.cache_config
    _check_options(vllm_config)
    if settings.host_memory == 0:
        _check_device_memory(vllm_config)
    settings.check_drafts(drafts_of(vllm_config))
    if on_gpu(vllm_config):
        settings.check_gpu()
    _check_worker(getattr(vllm_config.parallel_config, "worker_cls", WORKER))
    if getattr(cache, "user_specified_block_size", False):  # else vLLM asks the backend for a size
        settings.check_block_size(cache.block_size)
    return settings


def choose_block_size(vllm_config: Any) -> None:
    """Blocks of `BLOCK_TOKENS` on a GPU, unless the user said otherwise. vLLM asks a backend only if it is alone. Our windows
    have one of their own, and with two vLLM takes the smallest blocks that both know."""
    cache = vllm_config.cache_config
    if on_gpu(vllm_config) and not getattr(cache, "user_specified_block_size", True):
        cache.block_size, cache.user_specified_block_size = BLOCK_TOKENS, True


def on_gpu(vllm_config: Any) -> bool:
    """Whether the engine runs on an NVIDIA GPU."""
    return getattr(getattr(vllm_config, "device_config", None), "device_type", None) == "cuda"


def _check_device_memory(config: Any) -> None:
    """Raises CompositionError where device memory cannot hold all rows."""
    if not on_gpu(config):
        raise CompositionError(
            "vLLM with kvrecall and host_memory=0", "rows of a CPU lie in host memory", "Leave host_memory out."
        )


def _check_worker(chosen: str) -> None:
    """Raises ParameterError for a worker class of vLLM, as `module.Class`. Others may derive from kvrecall's; their layers ask
    (`backend.py`), because to import one here would load compilers."""
    if chosen.startswith("vllm."):
        raise ParameterError(
            "worker_cls", "kvrecall's worker, which restores windows", chosen, f"Leave it out, or subclass {WORKER}."
        )


def _check_options(config: Any) -> None:
    """Raises CompositionError for features of vLLM that do not work with rows in host memory."""
    parallel, cache, model = config.parallel_config, config.cache_config, config.model_config
    speculation = getattr(config, "speculative_config", None)
    scheduler = getattr(getattr(config, "scheduler_config", None), "scheduler_cls", None)
    own_dtype = str(getattr(model, "dtype", "auto")).removeprefix("torch.")
    refused = {
        "a KV connector": (config.kv_transfer_config is not None, "it would move pages without their rows"),
        "decode context parallelism": (
            getattr(parallel, "decode_context_parallel_size", 1) > 1, "a sequence's window cannot be shared out"
        ),
        "prefill context parallelism": (
            getattr(parallel, "prefill_context_parallel_size", 1) > 1, "a sequence's window cannot be shared out"
        ),
        "dual-batch overlap": (getattr(parallel, "enable_dbo", False), "both halves of a batch would search at once"),
        f"speculation by {getattr(speculation, 'method', None)}": (
            speculation is not None and speculation.method not in _DRAFTS, "only drafts that the CPU looks up are known to work"
        ),
        f"scheduler_cls={scheduler}": (not is_own(scheduler), "kvrecall's gives windows their pages; derive it from that"),
        "sleep mode": (getattr(model, "enable_sleep_mode", False), "it drops pages whose rows stay"),
        f"kv_cache_dtype={cache.cache_dtype}": (
            cache.cache_dtype not in ("auto", own_dtype, *(FP8 if on_gpu(config) else ())),
            f"rows are stored in the model's dtype ({own_dtype}), on a GPU also as {' or '.join(FP8)}",
        ),
        "calculate_kv_scales": (
            getattr(cache, "calculate_kv_scales", False), "summaries are of keys that were divided by a scale"
        ),
        "--use-replayssm": (getattr(cache, "use_replayssm", False), "its warm-up writes to blocks without memory for rows"),
        "multi-head latent attention": (getattr(model, "use_mla", False), "its cache has no keys of its own"),
        "layers that attend within chunks": (
            bool(getattr(model, "attention_chunk_size", None)), "a search would find tokens of other chunks"
        ),
        "--disable-hybrid-kv-cache-manager": (
            getattr(getattr(config, "scheduler_config", None), "disable_hybrid_kv_cache_manager", False),
            "summaries and recent tokens are two cache groups, which only the hybrid manager has",
        ),
        "a model whose layers all have a sliding window": (
            getattr(cache, "sliding_window", None) is not None, "such layers are vLLM's own, so nothing is left to retrieve"
        ),
    }  # fmt: skip
    if getattr(model, "is_mm_prefix_lm", False):
        what, why = "vLLM with kvrecall and images whose tokens attend in both directions", "there is no kernel for it"
        text = """Serve text alone (`--limit-mm-per-prompt '{"image": 0}'`, vLLM 0.32), or use another attention backend."""
        raise CompositionError(what, why, text)
    for name, (used, why) in refused.items():
        if used:
            raise CompositionError(f"vLLM with kvrecall and {name}", why, "Leave it out, or use another attention backend.")

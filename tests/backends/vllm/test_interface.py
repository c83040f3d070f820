"""What the backend overrides and reads exists in the installed vLLM, so that a new release fails here and not at a start.

Also what only engines on GPUs call: Model Runner V2 and the GPU's worker, which can be imported anywhere.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from dataclasses import fields, is_dataclass
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")
from vllm.platforms import current_platform

from kvrecall.backends.vllm import worker
from kvrecall.backends.vllm.backend import RetrievalBackend, RetrievalBuilder, RetrievalImpl
from kvrecall.backends.vllm.window import WindowBackend, WindowBuilder, WindowLayer
from kvrecall.backends.vllm.window_pages import WindowManager, WindowSpec
from kvrecall.step.warmup import FakeMetadata


def gpu_worker(monkeypatch: pytest.MonkeyPatch) -> type:
    """Our worker as it is on a GPU."""
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    spec = importlib.util.spec_from_file_location("kvrecall_gpu_worker", worker.__file__)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Worker


OURS = [
    RetrievalBackend, RetrievalBuilder, RetrievalImpl, WindowBackend, WindowBuilder, WindowLayer, WindowManager, WindowSpec,
    worker.Worker, "worker on a GPU",
]  # fmt: skip
NEW = {
    RetrievalBackend: {"customize_spec", "get_kv_cache_shape"},  # from 0.28 on, and before 0.29
    WindowBackend: {"get_kv_cache_shape"},
    RetrievalImpl: {"kind", "prepare", "warm_up", "clear", "take_statistics", "forward"},  # `forward` is that of a protocol
    worker.Worker: {"retrieval_counts"},
    RetrievalBuilder: {"metadata"},
    WindowManager: {"link", "take_restored"},
}
"""Public methods that are not vLLM's, or not in each release."""


@pytest.mark.parametrize("own", OURS, ids=str)
def test_methods_take_what_vllm_gives(own: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each overridden method exists in vLLM's class and accepts each of its parameters, by position and by name."""
    own = gpu_worker(monkeypatch) if isinstance(own, str) else own
    assert not getattr(own, "__abstractmethods__", None)
    named = next((names for ours, names in NEW.items() if ours.__name__ == own.__name__), set())
    for name, method in vars(own).items():
        if (name.startswith("_") and name != "__init__") or not inspect.isroutine(inspect.unwrap(getattr(own, name))):
            continue
        theirs = next((vars(base)[name] for base in own.__mro__[1:] if name in vars(base) and base is not object), None)
        if theirs is None:
            assert name in named or name == "__init__", f"{own.__name__}.{name} overrides nothing"
            continue
        if name == "__init__" and own in (WindowLayer, WindowSpec):  # only we make them
            continue
        taken, given = parameters(method), parameters(theirs)
        kinds, names = {kind for _, kind in taken}, {each for each, _ in taken}
        if inspect.Parameter.VAR_KEYWORD not in kinds:
            missing = [each for each, kind in given if kind not in VARIABLE and each not in names]
            assert not missing, f"{own.__name__}.{name} lacks {missing}"


VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def parameters(method: Any) -> list[tuple[str, Any]]:
    """(name, kind) of each parameter, without that of the object or class."""
    plain = inspect.unwrap(getattr(method, "__func__", method))
    found = [(each.name, each.kind) for each in inspect.signature(plain).parameters.values()]
    return [each for each in found if each[0] not in ("self", "cls")]


READ: dict[str, list[str]] = {
    "vllm.v1.attention.backend.CommonAttentionMetadata": [*(field.name for field in fields(FakeMetadata)), "num_actual_tokens"],
    "vllm.v1.core.sched.output.SchedulerOutput": ["scheduled_new_reqs", "scheduled_cached_reqs", "num_scheduled_tokens"],
    "vllm.v1.core.sched.output.NewRequestData": ["block_ids", "num_computed_tokens"],
    "vllm.v1.core.sched.output.CachedRequestData": ["req_ids", "resumed_req_ids", "new_block_ids", "num_computed_tokens"],
    "vllm.v1.kv_cache_interface.SlidingWindowSpec": ["sliding_window", "page_size_padded", "block_size", "num_kv_heads"],
    "vllm.v1.kv_cache_interface.KVCacheConfig": ["kv_cache_groups", "num_blocks"],
    "vllm.v1.kv_cache_interface.KVCacheGroupSpec": ["layer_names", "kv_cache_spec"],
    "vllm.v1.core.block_pool.BlockPool": [
        "get_new_blocks", "free_blocks", "touch", "get_cached_block", "get_num_free_blocks",
    ],
    "vllm.v1.core.sched.scheduler.Scheduler": ["schedule"],
    "vllm.v1.core.single_type_kv_cache_manager.SlidingWindowManager": ["get_num_skipped_tokens"],
    "vllm.v1.kv_cache_spec_registry.KVCacheSpecRegistry": ["_ensure_registered", "register"],
    "vllm.config.VllmConfig": [
        "parallel_config", "cache_config", "model_config", "scheduler_config", "compilation_config", "speculative_config",
        "kv_transfer_config", "additional_config", "attention_config", "device_config", "max_in_flight_tokens",
    ],
    "vllm.config.ParallelConfig": ["world_size", "worker_cls", "data_parallel_index"],
    "vllm.config.CacheConfig": ["cache_dtype", "block_size", "num_gpu_blocks_override"],
    "vllm.config.CompilationConfig": ["static_forward_context", "max_cudagraph_capture_size"],
    "vllm.config.AttentionConfig": ["backend"],
    "vllm.v1.worker.gpu_worker.Worker": ["get_kv_cache_spec", "execute_model", "sample_tokens", "load_model"],
    "vllm.v1.worker.gpu.model_runner.GPUModelRunner": ["get_model", "execute_model", "profile_run"],
    "vllm.v1.worker.gpu_model_runner.GPUModelRunner": ["get_model", "execute_model", "profile_run"],
    "vllm.forward_context.ForwardContext": ["attn_metadata"],
}  # fmt: skip


@pytest.mark.parametrize("path", READ)
def test_what_is_read_exists(path: str) -> None:
    module, _, name = path.rpartition(".")
    found = getattr(importlib.import_module(module), name)
    known = {field.name for field in fields(found)} if is_dataclass(found) else set()
    assert not [each for each in READ[path] if each not in known and not hasattr(found, each)]


def test_the_runner_s_warm_up_is_seen_by_our_worker() -> None:
    """Model Runner V2 makes requests up and gives them to `execute_model` of the worker, within `compile_or_warm_up_model`."""
    from vllm.v1.worker import gpu_worker as stock

    told = inspect.getsource(stock.Worker)
    assert "warmup_kernels(" not in told or "self.execute_model" in told.split("warmup_kernels(", 1)[1][:200]

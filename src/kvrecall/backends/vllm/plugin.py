"""What vLLM calls when it starts, in every process: `--attention-backend CUSTOM` is ours from then on."""

# vLLM is installed where this is imported.
# pyright: reportMissingImports=false

from __future__ import annotations

import warnings
from typing import Any

_BACKEND = "kvrecall.backends.vllm.backend.RetrievalBackend"
_registered = False


def register() -> None:
    """Entry point of vLLM's group `vllm.general_plugins`. Does nothing where it has been called.

    A vLLM without the classes that it needs goes on without our backend, which a RuntimeWarning says."""
    global _registered
    if _registered:
        return
    try:
        from vllm.platforms import current_platform
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    except ImportError as error:
        warnings.warn(f"this vLLM has no place for kvrecall's attention backend: {error}", RuntimeWarning, stacklevel=2)
        return
    from kvrecall.backends.vllm import metrics

    register_backend(AttentionBackendEnum.CUSTOM, _BACKEND)
    metrics.register()
    _choose_worker(type(current_platform), AttentionBackendEnum.CUSTOM)
    if current_platform.is_cpu():
        _choose_on_cpu(type(current_platform), AttentionBackendEnum.CUSTOM)
    _registered = True


def _choose_worker(platform: Any, custom: Any) -> None:
    """Engines with our backend get our worker, unless they ask for one; its platform chooses it otherwise."""
    own = platform.check_and_update_config.__func__

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        parallel = vllm_config.parallel_config
        if parallel.worker_cls == "auto" and vllm_config.attention_config.backend == custom:
            parallel.worker_cls = "kvrecall.backends.vllm.worker.Worker"
        own(cls, vllm_config)

    platform.check_and_update_config = classmethod(check_and_update_config)


def _choose_on_cpu(platform: Any, custom: Any) -> None:
    """vLLM's CPU platform takes its own backend whatever is asked for; if ours is, it gets ours."""
    own = platform.get_attn_backend_cls.__func__

    def get_attn_backend_cls(cls: Any, selected_backend: Any, *args: Any, **kwargs: Any) -> str:
        return _BACKEND if selected_backend == custom else own(cls, selected_backend, *args, **kwargs)

    platform.get_attn_backend_cls = classmethod(get_attn_backend_cls)

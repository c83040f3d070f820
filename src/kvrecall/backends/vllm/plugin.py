"""The plugin that vLLM loads in every process: it makes `--attention-backend CUSTOM` kvrecall's."""

# Only imported where vLLM is installed.
# pyright: reportMissingImports=false

from __future__ import annotations

import warnings
from typing import Any

_BACKEND = "kvrecall.backends.vllm.backend.RetrievalBackend"
_registered = False


def register() -> None:
    """Entry point of vLLM's group `vllm.general_plugins`. May be called again.

    With an unsupported vLLM version it registers nothing and gives a RuntimeWarning."""
    global _registered
    if _registered:
        return
    try:
        from vllm.platforms import current_platform
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    except ImportError as error:
        warnings.warn(
            f"kvrecall's attention backend does not work with this version of vLLM: {error}", RuntimeWarning, stacklevel=2
        )
        return
    from kvrecall.backends.vllm import metrics

    register_backend(AttentionBackendEnum.CUSTOM, _BACKEND)
    metrics.register()
    _choose_worker(type(current_platform), AttentionBackendEnum.CUSTOM)
    if current_platform.is_cpu():
        _choose_on_cpu(type(current_platform), AttentionBackendEnum.CUSTOM)
    _registered = True


def _choose_worker(platform: Any, custom: Any) -> None:
    """Makes the platform choose kvrecall's worker for engines with the backend, unless the user chose a worker."""
    from kvrecall.backends.vllm.machine import note_launch
    from kvrecall.backends.vllm.refused import choose_scheduler

    own = platform.check_and_update_config.__func__

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        parallel, asked = vllm_config.parallel_config, vllm_config.attention_config.backend == custom
        if parallel.worker_cls == "auto" and asked:
            parallel.worker_cls = "kvrecall.backends.vllm.worker.Worker"
        own(cls, vllm_config)
        if asked:
            note_launch(parallel)
            choose_scheduler(vllm_config)

    platform.check_and_update_config = classmethod(check_and_update_config)


def _choose_on_cpu(platform: Any, custom: Any) -> None:
    """vLLM's CPU platform always takes its own backend; this makes it take kvrecall's if chosen."""
    own = platform.get_attn_backend_cls.__func__

    def get_attn_backend_cls(cls: Any, selected_backend: Any, *args: Any, **kwargs: Any) -> str:
        return _BACKEND if selected_backend == custom else own(cls, selected_backend, *args, **kwargs)

    platform.get_attn_backend_cls = classmethod(get_attn_backend_cls)

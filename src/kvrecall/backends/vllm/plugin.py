"""The plugin that vLLM loads in every process: it makes `--attention-backend CUSTOM` kvrecall's."""

# Only imported where vLLM is installed.
# pyright: reportMissingImports=false

from __future__ import annotations

import warnings
from typing import Any

TESTED = ("0.26", "0.32", "0.33")
"""Releases of vLLM that kvrecall's tests run with."""
_BACKEND = "kvrecall.backends.vllm.backend.RetrievalBackend"
_registered = False


def register() -> None:
    """Entry point of vLLM's group `vllm.general_plugins`. May be called again.

    With a vLLM that lacks what is needed it registers nothing and gives a RuntimeWarning."""
    global _registered
    if _registered:
        return
    try:
        from vllm.platforms import current_platform
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    except ImportError as error:
        told = f"this vLLM lacks what it needs ({error}). Tested are {', '.join(TESTED)}."
        warnings.warn(f"kvrecall's attention backend is not registered: {told}", RuntimeWarning, stacklevel=2)
        return
    from kvrecall.backends.vllm import metrics

    register_backend(AttentionBackendEnum.CUSTOM, _BACKEND)
    metrics.register()
    _choose_worker(type(current_platform), AttentionBackendEnum.CUSTOM)
    if current_platform.is_cpu():
        _choose_on_cpu(type(current_platform), AttentionBackendEnum.CUSTOM)
    _registered = True


def _tell_version() -> None:
    """Warns of a vLLM that kvrecall's tests do not run with."""
    from vllm import __version__

    if ".".join(__version__.split(".")[:2]) not in TESTED:
        told = f"kvrecall is tested with vLLM {', '.join(TESTED)}, and this is {__version__}. Check its answers."
        warnings.warn(told, RuntimeWarning, stacklevel=2)


def _choose_worker(platform: Any, custom: Any) -> None:
    """Makes the platform choose kvrecall's worker for engines with the backend, unless the user chose a worker."""
    own = platform.check_and_update_config.__func__

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        parallel = vllm_config.parallel_config
        if parallel.worker_cls == "auto" and vllm_config.attention_config.backend == custom:
            _tell_version()
            parallel.worker_cls = "kvrecall.backends.vllm.worker.Worker"
        own(cls, vllm_config)

    platform.check_and_update_config = classmethod(check_and_update_config)


def _choose_on_cpu(platform: Any, custom: Any) -> None:
    """vLLM's CPU platform always takes its own backend; this makes it take kvrecall's if chosen."""
    own = platform.get_attn_backend_cls.__func__

    def get_attn_backend_cls(cls: Any, selected_backend: Any, *args: Any, **kwargs: Any) -> str:
        return _BACKEND if selected_backend == custom else own(cls, selected_backend, *args, **kwargs)

    platform.get_attn_backend_cls = classmethod(get_attn_backend_cls)

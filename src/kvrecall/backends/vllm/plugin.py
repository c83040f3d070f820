"""The plugin that vLLM loads in every process: it makes `--attention-backend CUSTOM` kvrecall's.

A server that does not ask for kvrecall loads this module and nothing else of it. What an engine asks for is known when vLLM
makes its config, in the server's process, before it starts others.
"""

# Only imported where vLLM is installed.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

TESTED = ("0.26", "0.32", "0.33")
"""Releases of vLLM that kvrecall's tests run with."""
_BACKEND = "kvrecall.backends.vllm.backend.RetrievalBackend"
OTHER_NAME = "KVRECALL"
"""The backend's name where another plugin has taken CUSTOM."""
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
        reason = f"this vLLM lacks what it needs ({error}). Tested are {', '.join(TESTED)}."
        warnings.warn(f"kvrecall's attention backend is not registered: {reason}", RuntimeWarning, stacklevel=2)
        return
    if not AttentionBackendEnum.CUSTOM.is_overridden():
        register_backend(AttentionBackendEnum.CUSTOM, _BACKEND)
    elif not is_own(AttentionBackendEnum.CUSTOM):
        _other_member()
    _hook_config(type(current_platform))
    _hook_choice(type(current_platform), current_platform.is_cpu())
    _registered = True


def _tell_version() -> None:
    """Warns of a vLLM that kvrecall's tests do not run with."""
    from vllm import __version__

    if ".".join(__version__.split(".")[:2]) not in TESTED:
        message = f"kvrecall is tested with vLLM {', '.join(TESTED)}, and this is {__version__}. Check its answers."
        warnings.warn(message, RuntimeWarning, stacklevel=2)


def is_own(member: Any) -> bool:
    """Whether a member of vLLM's `AttentionBackendEnum`, or None, is kvrecall's backend."""
    try:
        return member is not None and member.get_path() == _BACKEND
    except ValueError:  # nobody has registered it
        return False


def own_name() -> str:
    """The name of kvrecall's backend in vLLM."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return "CUSTOM" if is_own(AttentionBackendEnum.CUSTOM) else OTHER_NAME


def _other_member() -> Any:
    """The member OTHER_NAME, made if need be; None if vLLM has no names but its own (0.26)."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    if OTHER_NAME in AttentionBackendEnum.__members__:
        return AttentionBackendEnum[OTHER_NAME]
    if not hasattr(AttentionBackendEnum, "register"):
        return None
    member = AttentionBackendEnum.register(OTHER_NAME, _BACKEND)
    # Another process gets a config by pickle before it loads plugins, and knows only vLLM's own members.
    member.__reduce_ex__ = lambda protocol: (_other_member, ())
    return member


def _hook_config(platform: Any) -> None:
    """Makes the platform prepare engines that ask for kvrecall when their config is made."""
    own = platform.check_and_update_config.__func__

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        # An engine in its own process makes its config again when it has its cache. `block_size` is then its smallest group's.
        asks = vllm_config.cache_config.num_gpu_blocks is None and _asks(vllm_config)
        if asks:
            _begin(vllm_config)
        own(cls, vllm_config)
        if asks:
            _check(vllm_config)

    platform.check_and_update_config = classmethod(check_and_update_config)


def _asks(vllm_config: Any) -> bool:
    """Whether an engine has kvrecall's backend. Raises ParameterError if it has kvrecall's settings and another plugin's
    CUSTOM."""
    attention = vllm_config.attention_config
    chosen = [attention.backend, *attention.backend_per_kind.values()]
    if any(map(is_own, chosen)):
        return True
    given = vllm_config.additional_config
    others = next((member for member in chosen if member is not None and member.name == "CUSTOM"), None)
    if others is not None and isinstance(given, Mapping) and "kvrecall" in given:
        from kvrecall.backends.vllm import last_line
        from kvrecall.core.errors import ParameterError

        remedy = "Set VLLM_PLUGINS=kvrecall, so that vLLM loads no other plugin."
        if OTHER_NAME in type(others).__members__:  # not if the other plugin was loaded later
            remedy = f"Give --attention-backend {OTHER_NAME}, or set VLLM_PLUGINS=kvrecall."
        last_line.tell_last()
        with last_line.kept():
            raise ParameterError("attention backend CUSTOM", "kvrecall's", f"another plugin's ({others.get_path()})", remedy)
    return False


def _begin(vllm_config: Any) -> None:
    """Counters for `/metrics`, and kvrecall's worker, unless the user chose one."""
    from kvrecall.backends.vllm import last_line, metrics
    from kvrecall.backends.vllm.checks import WORKER

    _tell_version()
    last_line.tell_last()
    metrics.register()
    if vllm_config.parallel_config.worker_cls == "auto":
        vllm_config.parallel_config.worker_cls = WORKER


def _check(vllm_config: Any) -> None:
    """Raises errors of `kvrecall.core.errors` for what can be refused before weights are loaded. Then notes which engines start
    together, and chooses kvrecall's scheduler."""
    from kvrecall.backends.vllm import last_line
    from kvrecall.backends.vllm.checks import checked, choose_block_size
    from kvrecall.backends.vllm.machine import note_launch
    from kvrecall.backends.vllm.refused import choose_scheduler

    with last_line.kept():
        checked(vllm_config)
    choose_block_size(vllm_config)
    note_launch(vllm_config.parallel_config)
    choose_scheduler(vllm_config)


def _hook_choice(platform: Any, on_cpu: bool) -> None:
    """Makes the platform leave layers with a sliding window to its own backend, and a CPU's take kvrecall's at all."""
    own = platform.get_attn_backend_cls.__func__

    def get_attn_backend_cls(cls: Any, selected_backend: Any, attn_selector_config: Any, *args: Any, **kwargs: Any) -> str:
        if is_own(selected_backend):
            if attn_selector_config.has_sliding_window:
                selected_backend = None
            elif on_cpu:
                return _BACKEND
        return own(cls, selected_backend, attn_selector_config, *args, **kwargs)

    platform.get_attn_backend_cls = classmethod(get_attn_backend_cls)

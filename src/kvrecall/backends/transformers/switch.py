"""Sets our attention function in the configs of a model during a forward pass that retrieves."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAME = "kvrecall"


@dataclass
class _Switched:
    """A config that names our function: the name before, and the number of passes that need it."""

    config: PretrainedConfig
    previous: str
    passes: int = 0


_lock = threading.RLock()
_users = 0
"""Contexts of `registered`."""
_switched: dict[int, _Switched] = {}
"""By id of the config, which is kept alive. Models may share a config, and threads a model."""


@contextmanager
def registered(attention: Callable[..., Any], mask: Callable[..., Any]) -> Iterator[None]:
    """Inside, transformers knows our functions by name; the last exit takes the name away.

    A plain call in another thread may read the name just before a pass ends, so an attached model keeps it between passes.
    """
    global _users
    with _lock:
        _users += 1
        AttentionInterface.register(NAME, attention)
        AttentionMaskInterface.register(NAME, mask)
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users:
                AttentionInterface._global_mapping.pop(NAME, None)
                AttentionMaskInterface._global_mapping.pop(NAME, None)


@contextmanager
def switched(configs: list[PretrainedConfig], attention: Callable[..., Any], mask: Callable[..., Any]) -> Iterator[None]:
    """Inside, the configs name our attention and mask functions. The last pass over a config restores its name."""
    with registered(attention, mask):
        with _lock:
            for config in configs:
                entry = _switched.setdefault(id(config), _Switched(config, config._attn_implementation or "sdpa"))
                entry.passes += 1
                config._attn_implementation_internal = NAME
        try:
            yield
        finally:
            with _lock:
                for config in configs:
                    entry = _switched[id(config)]
                    entry.passes -= 1
                    if entry.passes:
                        continue
                    if config._attn_implementation == NAME:  # otherwise the caller has set another one meanwhile
                        config._attn_implementation_internal = entry.previous
                    del _switched[id(config)]


def own_attention(module: nn.Module) -> Callable[..., Any]:
    """The attention function that this module calls without kvrecall."""
    name = _own_name(module.config)
    if name in ALL_ATTENTION_FUNCTIONS:
        return ALL_ATTENTION_FUNCTIONS[name]
    for kind in type(module).__mro__:  # each modeling file has its own "eager" function
        eager = getattr(sys.modules.get(kind.__module__), "eager_attention_forward", None)
        if eager is not None:
            return eager
    return ALL_ATTENTION_FUNCTIONS["sdpa"]


def own_mask(config: PretrainedConfig | None) -> Callable[..., Any]:
    """The mask function for a config's attention function."""
    masks = AttentionMaskInterface._global_mapping
    return masks.get(_own_name(config), masks["sdpa"])


def _own_name(config: Any) -> str:
    entry = _switched.get(id(config))
    name = getattr(config, "_attn_implementation", None) if entry is None else entry.previous
    return "sdpa" if name in (None, NAME) else str(name)


def decoder_configs(model: PreTrainedModel) -> list[PretrainedConfig]:
    """The config objects that the attention layers of a model's text decoder read; without other towers."""
    text = model.config.get_text_config(decoder=True)
    others = {id(config) for config in _other_towers(model.config, text)}
    found = {id(config): config for config in (model.config, text)}
    for module in model.modules():
        config = getattr(module, "config", None)
        if isinstance(config, PretrainedConfig) and id(config) not in others:
            found.setdefault(id(config), config)
    return list(found.values())


def _other_towers(config: PretrainedConfig, text: PretrainedConfig) -> Iterator[PretrainedConfig]:
    for key in config.sub_configs:
        part = getattr(config, key, None)
        if part is None or part is text:
            continue
        if not _contains(part, text):
            yield part
        yield from _other_towers(part, text)


def _contains(config: PretrainedConfig, wanted: PretrainedConfig) -> bool:
    parts = [getattr(config, key, None) for key in config.sub_configs]
    return any(part is wanted or (part is not None and _contains(part, wanted)) for part in parts)

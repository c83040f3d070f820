"""The attention and mask functions of a forward pass that retrieves, and the configs that name them during one.

Layers that do not retrieve (sliding windows, shared weights, other towers) and calls of other threads get the model's own
functions, so their results are the same as without kvrecall.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel
from transformers.masking_utils import (
    AttentionMaskInterface,
    bidirectional_mask_function,
    causal_mask_function,
    flash_attention_mask,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvrecall.backends.transformers.forward_pass import ForwardPass, current
from kvrecall.backends.transformers.layer import LAYER_TAG, TaggedLayer
from kvrecall.core.errors import ParameterError, ShapeError, UnsupportedModelError
from kvrecall.core.structs import AttentionParams

_CHANGE_NOTHING = frozenset({
    "position_ids", "cache_position", "use_cache", "output_hidden_states", "output_router_logits", "return_dict",
    "logits_to_keep", "num_items_in_batch", "labels", "deterministic", "tokenizer",
})  # fmt: skip
"""Arguments that models pass to attention functions and that none reads."""


_ALWAYS_PASSED_ON = _CHANGE_NOTHING | {
    "scaling", "softcap", "s_aux", "dropout", "is_causal", "sliding_window", "position_bias", "output_attentions",
}  # fmt: skip
"""Arguments that the model's own attention function reads. Some models turn other arguments (indices of sparse attention) into
a mask, but only for attention functions that they know by name; ours is not one of them."""


OBSERVER_TAG = "kvrecall_observer"
"""Attribute of keys with a function that sees them and their queries (queries, keys), before the model's own attention."""


def retrieval_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Any]:
    """query `[B, H_q, T, D]`, key and value as the cache's `update` returned them -> (`[B, T, H_q, D]`, None)."""
    layer: TaggedLayer | None = getattr(key, LAYER_TAG, None)
    running = current()
    if running is None:
        observe = getattr(key, OBSERVER_TAG, None)
        if observe is not None:
            observe(query, key)
        return own_attention(module)(module, query, key, value, attention_mask, **kwargs)
    if layer is None:
        _refuse_unknown(module, kwargs, _ALWAYS_PASSED_ON)
        return own_attention(module)(
            module, query, key, value, _own_causal_mask(running, module, query, key, attention_mask), **kwargs
        )
    if value.shape != key.shape or getattr(value, LAYER_TAG, None) is not layer:
        raise UnsupportedModelError(_family(module), "values that are changed between the cache and the attention")
    if query.shape[2] != key.shape[2] or query.shape[1] % key.shape[1]:
        raise ShapeError("queries", f"a multiple of {key.shape[1]} heads, {key.shape[2]} tokens", list(query.shape), "")
    if layer.is_sliding:  # a captured window of the config's size needs no mask
        kwargs, attention_mask = {name: value for name, value in kwargs.items() if name != "sliding_window"}, None
    params = _params(module, query, kwargs)
    if attention_mask is not None and attention_mask.ndim != 2:
        got = "a mask that is not causal (image tokens or a prefix that see each other in both directions)"
        raise UnsupportedModelError(_family(module), got)
    out = layer.attend(query.to(key.dtype), key, value, attention_mask, params)
    if torch.is_grad_enabled() and query.requires_grad:
        out = _NoGradient.apply(out, query)
    return out.transpose(1, 2).contiguous(), None  # type: ignore[union-attr]


def retrieval_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Any:
    """For causal layers: padding as a 2-D mask (None without padding), so that long contexts need no query-by-key tensor.

    Masks of other patterns (sliding window, chunks, overlays) are made by the model's own mask function.
    """
    running, config = current(), kwargs.get("config")

    def own(**changes: Any) -> Any:
        return own_mask(config)(
            batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
            mask_function=mask_function, attention_mask=attention_mask, **{**kwargs, **changes},
        )  # fmt: skip

    if running is None:
        return own()
    if q_length == kv_length == 1 and attention_mask is None:
        return None  # a single token needs no mask, and a graph would record its construction
    if mask_function is bidirectional_mask_function:  # an encoder's states, which ours refuses
        return own(allow_is_bidirectional_skip=False)
    if mask_function is not causal_mask_function or kwargs.get("local_size"):
        return own()
    running.own_causal_mask = own
    # A mask may be longer than the tokens (static shapes); it is read by position from the left.
    padding = None if attention_mask is None else attention_mask[:, :kv_length]
    return flash_attention_mask(batch_size, q_length, kv_length, attention_mask=padding)


def _own_causal_mask(running: ForwardPass, module: nn.Module, query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor | None:
    """The mask that a non-retrieval layer's own attention function needs, instead of our 2-D mask."""
    ours = mask is None or (mask.ndim == 2 and mask.shape[1] == key.shape[2])
    if not ours or running.own_causal_mask is None or getattr(module, "is_causal", True) is False:
        return mask
    if mask is None and query.shape[2] == 1:
        return None
    own = running.own_causal_mask()
    return own if own is None or own.shape[-1] == key.shape[2] else mask


def _params(module: nn.Module, query: Tensor, given: dict[str, Any]) -> AttentionParams:
    """Our attention's parameters from the keyword arguments; refuses unknown ones."""
    rest = {name: value for name, value in given.items() if value is not None and name not in _CHANGE_NOTHING}
    scaling, softcap, sinks = rest.pop("scaling", query.shape[-1] ** -0.5), rest.pop("softcap", 0.0), rest.pop("s_aux", None)
    if dropout := rest.pop("dropout", 0.0):
        raise ParameterError("dropout", "0", dropout, "Call model.eval(); retrieval is for inference.")
    if rest.pop("is_causal", True) is False or getattr(module, "is_causal", True) is False:
        raise UnsupportedModelError(_family(module), "attention in both directions")
    if window := rest.pop("sliding_window", None):
        raise UnsupportedModelError(
            _family(module), f"a sliding window of {window} tokens in a layer whose config says that it sees the whole context"
        )
    if rest.pop("output_attentions", False):
        remedy = "Attention weights exist only for the tokens that a search found; leave output_attentions out."
        raise ParameterError("output_attentions", "False", True, remedy)
    _refuse_unknown(module, rest, frozenset())
    return AttentionParams(float(scaling), float(softcap or 0.0), sinks)


def _refuse_unknown(module: nn.Module, given: dict[str, Any], known: frozenset[str]) -> None:
    unknown = sorted(name for name, value in given.items() if name not in known and value is not None and value is not False)
    if unknown:
        raise UnsupportedModelError(_family(module), f"attention with the argument {', '.join(unknown)}")


def _family(module: nn.Module) -> str:
    return str(getattr(getattr(module, "config", None), "model_type", None) or type(module).__name__)


class _NoGradient(torch.autograd.Function):
    """Returns the attention's output; raises on backward."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, query: Tensor) -> Tensor:  # type: ignore[override]
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # type: ignore[override]
        remedy = "Retrieval has no gradient; train without a cache."
        raise ParameterError("backward", "a forward pass without a RetrievalCache", "one with it", remedy)


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
def registered() -> Iterator[None]:
    """Inside, transformers knows our functions by name; the last exit takes the name away.

    A plain call in another thread may read the name just before a pass ends, so an attached model keeps it between passes.
    """
    global _users
    with _lock:
        _users += 1
        AttentionInterface.register(NAME, retrieval_attention)
        AttentionMaskInterface.register(NAME, retrieval_mask)
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users:
                AttentionInterface._global_mapping.pop(NAME, None)
                AttentionMaskInterface._global_mapping.pop(NAME, None)


@contextmanager
def switched(configs: list[PretrainedConfig]) -> Iterator[None]:
    """Inside, the configs name our attention and mask functions. The last pass over a config restores its name."""
    with registered():
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

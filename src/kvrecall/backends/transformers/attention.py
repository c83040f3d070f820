"""The attention function and the mask function that transformers calls during a forward pass that retrieves.

Layers that do not retrieve (sliding windows, shared weights, other towers) and calls of other threads get the model's own
functions, so their results are the same as without kvrecall.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, flash_attention_mask

from kvrecall.backends.transformers.layer import LAYER_TAG, TaggedLayer
from kvrecall.backends.transformers.passes import OpenCall, current
from kvrecall.backends.transformers.switch import own_attention, own_mask
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
        raise UnsupportedModelError(
            _family(module),
            "a mask that is not causal (image tokens or a prefix that see each other in both directions)",
        )
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


def _own_causal_mask(running: OpenCall, module: nn.Module, query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor | None:
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
        raise ParameterError(
            "backward",
            "a forward pass without a RetrievalCache",
            "one with it",
            "Retrieval has no gradient; train without a cache.",
        )

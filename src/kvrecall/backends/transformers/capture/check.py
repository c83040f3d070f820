"""Decides what can be captured, and gives the reason if not."""

from __future__ import annotations

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, DynamicSlidingWindowLayer, LinearAttentionCacheLayerMixin

from kvrecall.backends.transformers.cache import RetrievalCache
from kvrecall.backends.transformers.families import changing_rotary
from kvrecall.backends.transformers.layer import RetrievalLayer
from kvrecall.core.errors import CaptureError
from kvrecall.core.launch import LEAST_CAPABILITY
from kvrecall.layer.slots.base import require_pinned
from kvrecall.layer.slots.dense import require_on_device
from kvrecall.methods.base import Method

PLAIN = "Decode with model.generate, which needs no capture."


def check_capture(model: PreTrainedModel, cache: RetrievalCache) -> None:
    """Raises CaptureError, with the reason, if the model's steps over the cache cannot be captured."""
    if not torch.cuda.is_available():
        raise CaptureError("there is no CUDA device", "Decode with model.generate; on a CPU there is nothing to capture.")
    capability = torch.cuda.get_device_capability(model.device if model.device.type == "cuda" else None)
    if capability < LEAST_CAPABILITY:
        least = ".".join(map(str, LEAST_CAPABILITY))
        raise CaptureError(f"the GPU's compute capability is {capability[0]}.{capability[1]}, below {least}", PLAIN)
    devices = set(map(str, (getattr(model, "hf_device_map", None) or {}).values()))
    if len(devices) > 1:
        raise CaptureError(f"the model is spread over {', '.join(sorted(devices))}", "Load it on one GPU, or by tp_plan.")
    check_methods(cache)
    text = model.config.get_text_config(decoder=True)
    check_layers(text, cache)
    if (kind := changing_rotary(text)) is not None:
        raise CaptureError(f"rotary embedding {kind!r} changes with the length", PLAIN)
    for state in cache.states:
        if state.shape.device.type != "cuda":
            raise CaptureError(f"the model is on {state.shape.device}", "Move it to a CUDA device.")
        if state.index is None:
            require_on_device(state)
        else:
            require_pinned(state)


def check_layers(text: PretrainedConfig, cache: RetrievalCache) -> None:
    """Raises CaptureError for layers that are neither retrieval nor sliding-window layers. text: the decoder's config."""
    kinds: list[str] = getattr(text, "layer_types", None) or []
    if len(cache.layers) < cache.signature.layers:  # older versions of transformers have no cache layer for these
        raise CaptureError("some layers attend to keys and values of others", PLAIN)
    for number, layer in enumerate(cache.layers):
        if isinstance(layer, RetrievalLayer):
            continue
        name = f"layer {number}"
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            raise CaptureError(f"{name} is linear attention or a convolution, and a trial run would change its state", PLAIN)
        if not isinstance(layer, CacheLayerMixin):
            raise CaptureError(f"{name} has no keys and values of its own", PLAIN)
        if type(layer) is not DynamicSlidingWindowLayer:
            raise CaptureError(f"{name} has a cache layer of its own kind, {type(layer).__name__}", PLAIN)
        if kinds[number : number + 1] == ["chunked_attention"]:
            raise CaptureError(f"{name} uses chunked attention, which has no captured form", PLAIN)
        if layer.sliding_window != getattr(text, "sliding_window", None):
            raise CaptureError(f"{name} has a window of {layer.sliding_window} tokens, but its mask has none", PLAIN)
        if layer.record_past:
            raise CaptureError(f"{name} keeps more tokens than its window, for crops", PLAIN)


def check_methods(cache: RetrievalCache) -> None:
    """Raises CaptureError if the method of some layer cannot be captured. A layer without search can be, if its rows lie on the
    device."""
    method, checked = cache.method, list[Method]()
    for number in (layer.number for layer in cache.retrieval_layers):
        own = method.at(number)
        if own in checked or not method.searches(number):
            continue
        checked.append(own)  # mostly the same in all layers, and every request that joins a step asks
        try:
            _check_method(own)
        except CaptureError as error:
            if own == method.at(-1):  # the same in all layers
                raise
            raise CaptureError(f"layer {number}: {error.reason}", error.remedy) from None


def _check_method(method: Method) -> None:
    config = method.index_config()
    if config is not None and config.searches_on_host and method.attends_on_host:
        raise CaptureError(
            f"{method.name} reranks and attends on the CPU, and a graph holds only work of the GPU",
            "Decode uncaptured (capture=None), or use an index that the GPU searches alone.",
        )
    if method.attends_on_host:
        raise CaptureError("the CPU attends to the retrieved rows", 'Use attend="device".')
    if config is None or config.captured is None or method.top_k is None:
        name = "no index" if config is None else f"index {config.name!r}"
        raise CaptureError(f"{method.name} has {name}, which needs the host in every step", PLAIN)
    if config.gqa == "per_head":  # the kernels make one selection per KV head
        raise CaptureError(f"gqa={config.gqa!r} has no kernel", 'Use another mode, for example "mean_softmax".')
    if method.static_config() is not None and not config.captured.static:
        reason = f"static sets beside a {config.name} index are not captured"
        raise CaptureError(reason, 'Use index="pages", or static=None.')
    if method.prune_config() is not None:
        raise CaptureError("selections are pruned on the host", PLAIN)
    if method.estimate_config() is None:
        return
    remedy = "Decode uncaptured (capture=None), or with estimate=None."
    if not config.captured.page_means:
        raise CaptureError(f"page means with index {config.name!r} have no kernel", remedy)
    if (trigger := method.trigger_config().name) != "every-step":
        raise CaptureError(f"with trigger {trigger!r} a held selection outlives the pages of its estimate", remedy)


def long_enough(cache: RetrievalCache) -> bool:
    """Whether every sequence is long enough to be searched. Shorter ones attend to everything, which graphs do not support."""
    states, searching = cache.states, [state for state in cache.states if state.index is not None]
    short = any(state.attends_whole_zone(b) for state in searching for b in range(state.shape.sequences))
    return len(states) == len(cache.retrieval_layers) and not short

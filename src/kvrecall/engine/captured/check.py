"""What can be captured, and why not otherwise."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from kvrecall.errors import CaptureError
from kvrecall.index.sphere import SphereConfig
from kvrecall.integrations.transformers import RetrievalCache
from kvrecall.launch import LEAST_CAPABILITY

PLAIN = "Decode with model.generate, which needs no capture."
_STATIC_ROPE = ("default", "linear", "llama3", "yarn", "proportional")


def check_capture(model: PreTrainedModel, cache: RetrievalCache) -> None:
    """Raises CaptureError with the reason."""
    if not torch.cuda.is_available():
        raise CaptureError("there is no CUDA device", "Decode with model.generate; on a CPU there is nothing to capture.")
    capability = torch.cuda.get_device_capability(model.device if model.device.type == "cuda" else None)
    if capability < LEAST_CAPABILITY:
        least = ".".join(map(str, LEAST_CAPABILITY))
        raise CaptureError(f"the GPU's compute capability is {capability[0]}.{capability[1]}, below {least}", PLAIN)
    method, config = cache.method, cache.method.index_config()
    if not isinstance(config, SphereConfig) or method.top_k is None:
        raise CaptureError(f"{method.name} searches on the host", PLAIN)
    if config.gqa == "per_head":  # the kernels make one selection per KV head
        raise CaptureError(f"gqa={config.gqa!r} has no kernel", 'Use another mode, for example "mean_softmax".')
    if method.attends_on_host:
        raise CaptureError("the CPU attends to the retrieved rows", 'Use attend="device".')
    if method.static_config() is not None:
        raise CaptureError("static sets are chosen on the host", PLAIN)
    if method.prune_config() is not None:
        raise CaptureError("selections are pruned on the host", PLAIN)
    if method.trigger_config().name == "speculative":
        raise CaptureError("the queries of the step before are kept on the host", PLAIN)
    if method.per_layer:
        raise CaptureError("layers have settings of their own, and one plan serves every layer of a graph", "Use per_layer=().")
    if method.dense_layers:
        raise CaptureError(f"layers {method.dense_layers} attend to the whole zone on the host", "Use dense_layers=().")
    if len(cache.retrieval_layers) != len(cache.layers):
        raise CaptureError("the model has sliding-window or linear layers, whose caches grow by copying", PLAIN)
    scaling = getattr(model.config.get_text_config(decoder=True), "rope_scaling", None) or {}
    kind = scaling.get("rope_type", "default")
    if kind not in _STATIC_ROPE:
        raise CaptureError(f"rotary embedding {kind!r} changes with the length", PLAIN)
    for state in (layer.state for layer in cache.retrieval_layers):
        if state is None:
            continue
        if state.shape.device.type != "cuda":
            raise CaptureError(f"the model is on {state.shape.device}", "Move it to a CUDA device.")
        if not all(block.is_pinned() for pool in state.store.host for _, block in pool.segments()):
            raise CaptureError("the system refused to pin host memory", "Raise the locked-memory limit (`ulimit -l`).")


def long_enough(cache: RetrievalCache) -> bool:
    """Whether every sequence is long enough to be searched; a shorter one is attended whole, which no graph does."""
    states = [layer.state for layer in cache.retrieval_layers]
    return all(state is not None and not any(map(state.attends_whole_zone, range(state.shape.sequences))) for state in states)

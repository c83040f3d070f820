"""transformers' own layers of a cache, as they were before a forward pass: what an undone pass goes back to.

A sliding window replaces its tensors, so references are enough. Linear attention, convolutions and Mamba write into their
states, some of them in kernels, so these are copied: about as many bytes as one step reads of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer, LinearAttentionCacheLayerMixin

from kvrecall.core.structs import lasting_tensors


@dataclass(frozen=True)
class LayersBefore:
    """The layers of a cache that held `tokens` tokens per sequence."""

    tokens: int
    layers: list[tuple[Any, dict[str, Any]]]
    """Each layer with a copy of its attributes."""

    @staticmethod
    def of(layers: Iterable[Any], tokens: int) -> LayersBefore:
        """The current state of transformers' layers among `layers`."""
        with lasting_tensors(), torch.no_grad():
            return LayersBefore(tokens, [(layer, _copied(vars(layer))) for layer in layers if _has_state(layer)])

    def restore(self, only: Any = None) -> None:
        """Puts every layer back, or only one; may be repeated."""
        with lasting_tensors(), torch.no_grad():
            for layer, attributes in self.layers:
                if only in (None, layer):
                    vars(layer).update(_copied(attributes))


def keeps_running_state(layer: Any) -> bool:
    """Whether a layer keeps a running state, from which tokens cannot be removed."""
    return isinstance(layer, LinearAttentionCacheLayerMixin)


def can_crop(layer: Any) -> bool:
    """Whether tokens can be removed from a layer's end."""
    if keeps_running_state(layer):
        return layer.record_past and layer.is_croppable
    window = getattr(layer, "sliding_window", None) if isinstance(layer, DynamicLayer) else None
    return window is None or getattr(layer, "record_past", False) or layer.get_seq_length() < window


def _has_state(layer: Any) -> bool:
    return isinstance(layer, DynamicLayer) or keeps_running_state(layer)


def _copied(attributes: dict[str, Any]) -> dict[str, Any]:
    """The attributes with copies of the states, which are in dictionaries by number."""
    return {
        name: {n: x.clone() if isinstance(x, Tensor) else x for n, x in value.items()} if isinstance(value, dict) else value
        for name, value in attributes.items()
    }

"""What the installed transformers calls the cache in a model's arguments and outputs.

It is `cache` from 5.24 on, where `past_key_values` still works with a warning, and `past_key_values` before.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast

_OLD = "past_key_values"
CACHE = "cache" if any(field.name == "cache" for field in fields(CausalLMOutputWithPast)) else _OLD
"""The name that this release gives no warning for."""


def cache_argument(cache: Any) -> dict[str, Any]:
    """The keyword argument that passes `cache` to a model, its `generate` or its outputs."""
    return {CACHE: cache}


def given_cache(given: dict[str, Any]) -> Any:
    """The cache among the keyword arguments of a call, under either name that this release takes; None if there is none.

    With both names the newer one counts, as in transformers.
    """
    return given.get(CACHE if CACHE in given else _OLD)


def output_with(cache: Any, logits: Tensor | None = None) -> CausalLMOutputWithPast:
    """What a causal language model returns for `cache`. logits: fp32 or the model's dtype `[B, T, vocabulary]`."""
    return CausalLMOutputWithPast(**{"logits": logits, CACHE: cache})

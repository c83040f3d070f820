"""Pages of one size for kvrecall's layers and for those with a sliding window, which vLLM's own backend serves. Does not import
vLLM.

They share one pool of blocks. vLLM would make all pages as large as the largest, a block of keys and values. So layers with a
sliding window get smaller blocks here: a power of two of tokens whose page holds a page of summaries. The rest of that page is
padding behind the summaries.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from kvrecall.core.errors import CompositionError
from kvrecall.core.launch import cdiv, next_power_of_2
from kvrecall.step.capacity import holds_states

_LEAST = 32
"""Tokens of the smallest block; vLLM's backends need multiples of 16 or 32."""


def alike(specs: Mapping[str, Any], ours: Collection[str]) -> dict[str, Any]:
    """The cache specs of all layers, by name. Only layers with a sliding window, and kvrecall's beside them, are changed. ours:
    the names of kvrecall's layers. Raises CompositionError for a model with recurrent layers as well."""
    windows = {name: spec for name, spec in specs.items() if name not in ours and getattr(spec, "sliding_window", None)}
    if not windows:
        return dict(specs)
    if any(map(holds_states, specs.values())):
        why = "vLLM would align states to the smaller blocks of sliding windows"
        remedy = "Use another attention backend."
        raise CompositionError("vLLM with kvrecall, recurrent layers and sliding windows in one model", why, remedy)
    page = max(specs[name].page_size_bytes for name in ours)
    for name, spec in windows.items():
        tokens = cdiv(page * spec.block_size, spec.page_size_bytes)
        windows[name] = replace(spec, block_size=max(_LEAST, next_power_of_2(tokens)))
    largest = max(spec.page_size_bytes for spec in windows.values())
    return {**specs, **windows, **{name: replace(specs[name], page_size_padded=largest) for name in ours}}

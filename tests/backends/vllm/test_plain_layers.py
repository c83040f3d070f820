"""Layers of vLLM that attend otherwise than each token to all before it are refused, however they say so."""

# vLLM is installed where this is run.
# pyright: reportMissingImports=false

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="vLLM has an environment of its own")

from typing import Any

from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention.chunked_local_attention import ChunkedLocalAttention

from kvrecall.backends.vllm.backend import RetrievalBackend, _check_plain
from kvrecall.core.errors import CompositionError


def layer(kind: type = Attention, backend: type = RetrievalBackend, **more: int) -> Any:
    """A layer without weights."""
    made: Any = object.__new__(kind)
    made.__dict__.update(attn_backend=backend, head_size=64, **more)
    return made


def test_a_layer_that_attends_to_all_its_tokens_is_served() -> None:
    _check_plain(layer())
    _check_plain(layer(head_size_v=64))
    _check_plain(layer(type("Renamed", (Attention,), {})))


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (layer(backend=type("Chunks", (RetrievalBackend,), {})), "backend is Chunks"),
        (layer(ChunkedLocalAttention), "ChunkedLocalAttention says how its keys are cached"),
        (layer(head_size_v=32), "keys have 64 numbers, values 32"),
    ],
    ids=["wrapped", "chunks", "values"],
)
def test_others_are_refused(layer: Any, reason: str) -> None:
    with pytest.raises(CompositionError, match=reason):
        _check_plain(layer)

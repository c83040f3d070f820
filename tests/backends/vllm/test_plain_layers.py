"""Layers of vLLM that attend otherwise than each token to all before it are refused, however they say so."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="vLLM has an environment of its own")

from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from kvrecall.backends.vllm.backend import RetrievalBackend, _check_plain
from kvrecall.core.errors import CompositionError

OWN: Any = {"block_size": 128, "num_kv_heads": 2, "head_size": 64, "dtype": torch.float32}
PLAIN = FullAttentionSpec(**OWN)


def layer(backend: type = RetrievalBackend, **more: int) -> SimpleNamespace:
    return SimpleNamespace(attn_backend=backend, head_size=64, **more)


def test_a_layer_that_attends_to_all_its_tokens_is_served() -> None:
    _check_plain(layer(), PLAIN)
    _check_plain(layer(head_size_v=64), PLAIN)


@pytest.mark.parametrize(
    ("layer", "spec", "reason"),
    [
        (layer(type("Chunks", (RetrievalBackend,), {})), PLAIN, "by Chunks"),
        (layer(), SlidingWindowSpec(**OWN, sliding_window=64), "cached as SlidingWindowSpec"),
        (layer(), type("Prefix", (FullAttentionSpec,), {})(**OWN), "cached as Prefix"),
        (layer(), FullAttentionSpec(**OWN, attention_chunk_size=256), "cached as FullAttentionSpec"),
        (layer(head_size_v=32), PLAIN, "keys have 64 numbers, values 32"),
    ],
    ids=["wrapped", "window", "other", "chunks", "values"],
)
def test_others_are_refused(layer: Any, spec: Any, reason: str) -> None:
    with pytest.raises(CompositionError, match=reason):
        _check_plain(layer, spec)

"""Which layers with sliding windows are captured, and what is refused of them."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
import torch
import transformers

import kvrecall
from kvrecall import engine
from kvrecall.core.errors import CaptureError
from tests.backends.models import SMALL, tiny

pytest.importorskip("triton", reason="Triton is only there on Linux")
from kvrecall.backends.transformers.capture import runner
from kvrecall.backends.transformers.capture.check import check_layers
from kvrecall.backends.transformers.capture.graph import DecodeGraph
from kvrecall.backends.transformers.capture.runner import GraphRunner, StepInput
from tests.backends.test_capture import RETRIEVES, prefilled

WINDOWS: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}


@pytest.mark.parametrize(
    ("family", "changes"), [("gemma2", {}), ("gemma3", {}), ("gpt_oss", {}), ("cohere2", {}), ("qwen2", WINDOWS)]
)
def test_sliding_windows_are_captured(family: str, changes: dict[str, Any]) -> None:
    config = tiny(family, **changes).config
    cache = kvrecall.RetrievalCache(config, RETRIEVES)
    assert len(cache.retrieval_layers) == 1
    check_layers(config, cache)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (
            transformers.Llama4TextConfig(
                **SMALL, attention_chunk_size=8, layer_types=["chunked_attention", "full_attention", "chunked_attention"]
            ),
            "layer 0 uses chunked attention, which has no captured form",
        ),
        (
            transformers.Qwen3NextConfig(**SMALL, layer_types=["full_attention", "linear_attention", "linear_attention"]),
            "layer 1 is linear attention or a convolution, and a trial run would change its state",
        ),
        (
            transformers.Lfm2Config(**SMALL, layer_types=["conv", "full_attention", "conv"]),
            "layer 0 is linear attention or a convolution",
        ),
    ],
    ids=["chunks", "linear", "convolution"],
)
def test_layers_of_other_kinds_are_refused_by_name(config: Any, reason: str) -> None:
    with pytest.raises(CaptureError, match=f"({reason}).*Decode with model\\.generate"):
        check_layers(config, kvrecall.RetrievalCache(config, RETRIEVES))


def test_windows_that_are_not_the_mask_s_or_keep_their_past_are_refused() -> None:
    config = tiny("gemma2").config
    cache = kvrecall.RetrievalCache(config, RETRIEVES)
    cache.activate_past_recording()
    with pytest.raises(CaptureError, match="layer 0 keeps more tokens than its window"):
        check_layers(config, cache)
    layer: Any = cache.layers[0]
    layer.sliding_window = 5
    with pytest.raises(CaptureError, match="layer 0 has a window of 5 tokens, but its mask has none"):
        check_layers(config, cache)


def test_padding_between_tokens_that_are_still_seen_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second turn is padded on the left, so behind the first; it is no matter where only padding is before it in a window."""
    monkeypatch.setattr(runner, "check_capture", lambda *_: None)
    monkeypatch.setattr(DecodeGraph, "record", lambda *_: None)
    model = tiny("gemma2", sliding_window=8)
    prompt = torch.randint(5, 90, (2, 60), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(prompt)
    mask[1, 40:43] = 0
    cache, captured = kvrecall.RetrievalCache(model.config, RETRIEVES), GraphRunner(model)
    for end, refused in ((40, False), (44, True), (46, True), (47, False), (52, False)):
        engine.prefill(model, prompt[:, :end], cache, attention_mask=mask[:, :end])
        before = list(cache.layers)
        if refused:
            with pytest.raises(CaptureError, match="the window of layer 0 holds padding between tokens"):
                captured.borrow([StepInput(cache, prompt[:, :1], 8)])
        else:
            captured.borrow([StepInput(cache, prompt[:, :1], 8)])
            assert [type(x).__name__ for x in cache.layers] == ["SlidingWindow", "RetrievalLayer", "SlidingWindow"]
            monkeypatch.setattr(torch.cuda, "current_stream", Mock)
            captured.close()
        assert cache.layers == before


def test_a_window_that_does_not_fit_names_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "check_capture", lambda *_: None)
    model = tiny("gemma2")
    cache = prefilled(model)[0]
    before = list(cache.layers)
    monkeypatch.setattr(
        "kvrecall.backends.transformers.capture.sliding.WholeAttention", Mock(side_effect=torch.OutOfMemoryError)
    )
    with pytest.raises(CaptureError, match="layer 0's windows of 32,768 bytes"):
        GraphRunner(model).borrow([StepInput(cache, torch.zeros(1, 1, dtype=torch.int64), 8)])
    assert cache.layers == before and all(layer.captured is None for layer in cache.retrieval_layers)

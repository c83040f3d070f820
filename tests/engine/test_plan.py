"""Memory plans: the arithmetic of one published shape, and the bytes that a real cache then takes."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

import kvrecall
from kvrecall import engine
from kvrecall.core.errors import ParameterError
from tests.backends.models import tiny
from tests.backends.test_transformers import ZONES

LLAMA_8B = LlamaConfig(
    num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, hidden_size=4096, max_position_embeddings=131072
)


def test_llama_8b_at_128k() -> None:
    """Full cache 16 GiB; summaries 96 bytes per token, layer and KV head."""
    made = engine.plan(LLAMA_8B, context_tokens=131072, method=kvrecall.ParisKV())
    zone = 131072 - 64 - 256
    assert made.full_attention_device_bytes == 16 * 2**30
    assert made.host_bytes_per_token == 32 * 8 * 2 * 128 * 2
    assert made.summary_bytes_per_token == 32 * 8 * 96
    assert made.host_bytes == zone * made.host_bytes_per_token
    assert made.summary_bytes == zone * 32 * 8 * 96
    assert made.resident_bytes == (64 + 256 + 512) * made.host_bytes_per_token
    assert made.device_bytes == made.resident_bytes + made.summary_bytes
    assert made.device_bytes < made.full_attention_device_bytes / 4
    assert made.to_dict()["method"] == "pariskv"


@pytest.mark.parametrize(
    ("method", "per_token"),
    [
        (kvrecall.Full(), 0),
        (kvrecall.Exact(), 32 * 8 * 256),
        (kvrecall.ParisKV(weight_dtype="float32"), 32 * 8 * 128),
        (kvrecall.ParisKV(dense_layers=(0, 1, 99)), 30 * 8 * 96),
    ],
    ids=["full", "exact", "fp32-weights", "two-dense-layers"],
)
def test_summaries_per_method(method: kvrecall.Method, per_token: int) -> None:
    assert engine.plan(LLAMA_8B, context_tokens=1000, method=method).summary_bytes_per_token == per_token


def test_short_contexts_need_no_host() -> None:
    made = engine.plan(LLAMA_8B, context_tokens=100, method=kvrecall.ParisKV())
    assert made.host_bytes == made.summary_bytes == 0 and made.fits_host


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
@pytest.mark.parametrize(
    "method",
    [kvrecall.ParisKV(top_k=5, **ZONES), kvrecall.Exact(top_k=5, **ZONES), kvrecall.Full(**ZONES)],
    ids=lambda m: m.name,
)
def test_a_reserved_cache_takes_what_was_planned(family: str, method: kvrecall.Method) -> None:
    """Sliding layers are not ours and not in the plan. Summaries also have a table of counts, whatever the length."""
    model = tiny(family)
    made = engine.plan(model.config, context_tokens=300, method=method, batch=2, dtype=torch.float32)
    cache = kvrecall.RetrievalCache(model.config, method)
    ids = torch.randint(3, 320, (2, 300), generator=torch.Generator().manual_seed(0))
    engine.prefill(model, ids, cache, chunk_tokens=100)
    total = cache.stats().total
    assert made.layers == len(cache.retrieval_layers)
    assert total.host_bytes == made.host_bytes
    assert total.device_bytes - total.summary_bytes == made.resident_bytes
    counts = 2 * 2 * 8 * 256 * 4 * made.layers if method.name == "pariskv" else 0
    assert total.summary_bytes == made.summary_bytes + counts


def test_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    def fits(free: int) -> bool:
        # By module, as the package has a function of the same name.
        monkeypatch.setattr(import_module("kvrecall.engine.plan"), "available_host_bytes", lambda: free)
        return engine.plan(LLAMA_8B, context_tokens=10_000, method=kvrecall.ParisKV()).fits_host

    made = engine.plan(LLAMA_8B, context_tokens=10_000, method=kvrecall.ParisKV())
    need = made.host_bytes + (0 if torch.cuda.is_available() else made.device_bytes)
    assert fits(need) and not fits(need - 1)


@pytest.mark.parametrize("change", [{"context_tokens": 0}, {"batch": 0}, {"context_tokens": -5}], ids=str)
def test_impossible_plans(change: dict[str, Any]) -> None:
    with pytest.raises(ParameterError, match=next(iter(change))):
        engine.plan(LLAMA_8B, **{"context_tokens": 10, "method": kvrecall.Full(), **change})

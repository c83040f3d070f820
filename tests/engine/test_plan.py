"""Memory plans: the arithmetic of one published shape, and the bytes that a real cache then takes."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

import kvrecall
from kvrecall import engine, models
from kvrecall.cache.blocks import block_size_on
from kvrecall.cache.device_memory import SPARE_BYTES
from kvrecall.core.errors import ParameterError
from kvrecall.core.launch import cdiv
from kvrecall.engine.memory import plan_vllm
from tests.backends.models import tiny
from tests.backends.test_transformers import ZONES

LLAMA_8B = LlamaConfig(
    num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, hidden_size=4096, max_position_embeddings=131072
)


def in_whole_blocks(tokens: int) -> int:
    """Tokens that the blocks of so many tokens have room for, where a plan says that this machine computes."""
    size = block_size_on(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    return size * cdiv(tokens, size)


def test_llama_8b_at_128k() -> None:
    """Full cache 16 GiB; summaries 96 bytes per token of whole blocks, layer and KV head."""
    made = engine.plan(LLAMA_8B, context_tokens=131072, method=kvrecall.ParisKV())
    zone = 131072 - 64 - 256
    assert made.full_attention_device_bytes == 16 * 2**30
    assert made.host_bytes_per_token == 32 * 8 * 2 * 128 * 2
    assert made.summary_bytes_per_token == made.summary_bytes / zone
    assert made.host_bytes == zone * made.host_bytes_per_token
    assert made.summary_bytes == in_whole_blocks(zone) * 32 * 8 * 96
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
    """Codes of ParisKV and exact keys lie in whole blocks."""
    zone = 1000 - method.sink_tokens - method.local_tokens
    tokens = in_whole_blocks(zone) if method.name in ("pariskv", "exact") else zone
    assert engine.plan(LLAMA_8B, context_tokens=1000, method=method).summary_bytes == per_token * tokens


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
    assert total.host_bytes == made.host_bytes + made.device_row_bytes  # the model is on the CPU, whatever GPU there is
    assert total.device_bytes - total.summary_bytes == made.resident_bytes
    counts = 2 * 2 * 8 * 256 * 4 * made.layers if method.name == "pariskv" else 0
    assert total.summary_bytes == made.summary_bytes + counts


def test_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    def fits(free: int) -> bool:
        # By module, as the package has a function of the same name.
        monkeypatch.setattr(import_module("kvrecall.engine.memory"), "available_host_bytes", lambda: free)
        return engine.plan(LLAMA_8B, context_tokens=10_000, method=kvrecall.ParisKV()).fits_host

    made = engine.plan(LLAMA_8B, context_tokens=10_000, method=kvrecall.ParisKV())
    beside = made.weight_bytes + made.activation_bytes
    need = made.host_bytes + (0 if torch.cuda.is_available() else made.device_bytes + beside)
    assert fits(need) and not fits(need - 1)


@pytest.mark.parametrize("spare_layers", [None, 0, 1, 31, 32, 40])
@pytest.mark.parametrize(("method", "dense"), [(kvrecall.Full(), 32), (kvrecall.ParisKV(dense_layers=(0, 5)), 2)])
def test_rows_of_layers_that_search_nothing_are_counted_where_they_fit(
    method: kvrecall.Method, dense: int, spare_layers: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """spare_layers: whose rows fit on the GPU beside everything else; None: there is no GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    plain = engine.plan(LLAMA_8B, context_tokens=10_000, method=method, batch=2)
    assert plain.device_row_bytes == 0
    if spare_layers is None:
        return
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 0))
    plain = engine.plan(LLAMA_8B, context_tokens=10_000, method=method, batch=2)  # blocks of a GPU are smaller
    assert plain.device_row_bytes == 0
    each = plain.host_bytes // 32
    free = plain.weight_bytes + plain.activation_bytes + plain.device_bytes + SPARE_BYTES + spare_layers * each
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, free))
    made = engine.plan(LLAMA_8B, context_tokens=10_000, method=method, batch=2)
    near = min(spare_layers, dense)
    assert made.device_row_bytes == near * each and made.host_bytes == plain.host_bytes - near * each
    assert made.device_bytes == plain.device_bytes + near * each and made.fits_device
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free - 1, free - 1))
    fewer = engine.plan(LLAMA_8B, context_tokens=10_000, method=method, batch=2)
    assert fewer.device_row_bytes == min(max(0, spare_layers - 1), dense) * each


@pytest.mark.parametrize("change", [{"context_tokens": 0}, {"batch": 0}, {"context_tokens": -5}], ids=str)
def test_impossible_plans(change: dict[str, Any]) -> None:
    with pytest.raises(ParameterError, match=next(iter(change))):
        engine.plan(LLAMA_8B, **{"context_tokens": 10, "method": kvrecall.Full(), **change})


def test_weights_count_as_they_are_loaded(tmp_path: Path) -> None:
    """Those of a quantised folder take what its files take."""
    assert engine.plan(LLAMA_8B, context_tokens=100, method=kvrecall.ParisKV()).weight_bytes > 11 * 10**9
    quantised = LlamaConfig(quantization_config={"quant_method": "fp8"})
    (tmp_path / "config.json").write_text("{}")
    for name, count in {"a.safetensors": 700, "b.safetensors": 300, "c.json": 50}.items():
        (tmp_path / name).write_bytes(bytes(count))
    assert models.quantised_bytes(tmp_path, quantised) == 1000
    assert models.quantised_bytes(tmp_path, LLAMA_8B) is None
    made = engine.plan(LLAMA_8B, context_tokens=100, method=kvrecall.ParisKV(), weight_bytes=1000)
    assert made.weight_bytes == 1000
    planned = {"context_tokens": 1000, "ranks": 2, "page_bytes": 1 << 30}
    assert plan_vllm(LLAMA_8B, {"host_memory": 1 << 30}, **planned, weight_bytes=1000).weight_bytes == 500

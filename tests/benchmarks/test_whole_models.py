"""Benchmarks of whole models, as far as a CPU goes: what they refuse, what a side that does not fit leaves behind."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from math import isnan
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from benchmarks import full_decode, gpu_decode, gpu_generate, gpu_prefill, models, verify
from benchmarks.bandwidth import Bandwidths
from benchmarks.byte_counts import weight_bytes
from benchmarks.full_decode import DOES_NOT_FIT, Full, full_bytes, full_step
from benchmarks.gpu_decode import Retrieval
from benchmarks.inputs import Gaussian, Traced, Turning
from benchmarks.verify import COMPILED_TOLERANCE, check_compiled
from kvrecall.backends.transformers import RetrievalCache
from kvrecall.backends.transformers.families import ModelSignature
from kvrecall.core.errors import HostMemoryError, ParameterError
from kvrecall.evaluate.trace import LayerTrace, Trace, TraceInfo

TINY = {
    "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 128, "vocab_size": 512,
}  # fmt: skip


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(models.SHAPES, "tiny", TINY)
    monkeypatch.setattr(gpu_decode, "bandwidths", lambda: Bandwidths(device=1e6, bus=1e3, by="copy"))
    yield
    full_step.cache_clear()
    gpu_prefill._prompt.cache_clear()


def on_cpu(shape: str, layers: int | None, context: int) -> Any:
    return models.model_of(shape, layers, context, "cpu")


@pytest.mark.parametrize("name", ["product", "balanced"])
def test_a_row_of_a_prefill_adds_up(name: str) -> None:
    row = gpu_prefill.measure("tiny", 2, 1200, 500, name, repeats=1, device="cpu")
    assert (row.layers, row.context, row.config, row.plain_backend) == (2, 1200, name, "flash_attention")
    assert row.index_s == row.encode_s + row.settle_s and row.build_share == row.index_s / row.plain_s
    assert row.settle_s < row.encode_s  # keys are coded as they come
    assert 0 < row.hidden_error < gpu_prefill.TOLERANCE and isnan(row.plain_p20_s) and isnan(row.retrieval_p80_s)


def test_a_prefill_that_attends_to_something_else_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def near(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float | None) -> torch.Tensor:
        """Without the first of the cached keys."""
        first = min(32, k.shape[2] - q.shape[2])
        return gpu_prefill.flash(q, k[:, :, first:], v[:, :, first:], scaling)

    monkeypatch.setattr(gpu_prefill, "BACKENDS", {"near": near})
    with pytest.raises(AssertionError, match="hidden states differ"):
        gpu_prefill.measure("tiny", 2, 600, 500, "product", repeats=1, device="cpu")


def test_two_calls_of_cudnn_are_one_causal_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    def kernel(q: Any, k: Any, v: Any, bias: None, lse: bool, dropout: float, causal: bool, *, scale: float) -> Any:
        k, v = (x.repeat_interleave(2, 1) for x in (k, v))
        logits = q @ k.transpose(-1, -2) * scale
        if causal:
            logits = logits.masked_fill(torch.ones_like(logits).triu(1).bool(), float("-inf"))
        return logits.softmax(-1) @ v, logits.logsumexp(-1), None

    monkeypatch.setattr(
        gpu_prefill.torch, "ops", SimpleNamespace(aten=SimpleNamespace(_scaled_dot_product_cudnn_attention=kernel))
    )
    q, k, v = torch.randn(1, 4, 7, 16), torch.randn(1, 2, 40, 16), torch.randn(1, 2, 40, 16)
    mask = torch.ones(7, 40).tril(33).bool()
    for seen in (40, 7):  # behind cached keys, and without any
        expected = F.scaled_dot_product_attention(
            q, k[:, :, -seen:], v[:, :, -seen:], mask[:, -seen:], scale=0.3, enable_gqa=True
        )
        torch.testing.assert_close(gpu_prefill.cudnn(q, k[:, :, -seen:], v[:, :, -seen:], 0.3), expected)


def test_weights_that_a_step_reads_are_the_models_without_its_embedding() -> None:
    model = on_cpu("tiny", 3, 1000)
    every = sum(p.nbytes for p in model.parameters())
    assert weight_bytes(TINY | {"num_hidden_layers": 3}) == every - model.model.embed_tokens.weight.nbytes


def test_keys_that_do_not_fit_are_not_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(full_decode, "model_of", on_cpu)
    monkeypatch.setattr(full_decode, "time_full", lambda *_: Full(0.9, 1.0, 1.1, "flash", 2.0))
    need = 2 * 3 * 2 * 1001 * 128 * 2 * 2  # K and V, batch, heads, tokens, D, bf16, layers
    assert full_bytes(on_cpu("tiny", 2, 1000), 1000, 3) == need
    monkeypatch.setattr(full_decode, "free_device_bytes", lambda _: need + full_decode.SPARE_BYTES - 1)
    assert full_step("tiny", 2, 1000, 3) is DOES_NOT_FIT
    full_step.cache_clear()
    monkeypatch.setattr(full_decode, "free_device_bytes", lambda _: need + full_decode.SPARE_BYTES)
    assert full_step("tiny", 2, 1000, 3).p50_ms == 1.0


def test_memory_of_a_side_that_ran_out_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[weakref.ref[torch.Tensor]] = []

    def time_full(model: Any, *_: Any) -> Full:
        stores = [torch.zeros(8)]
        held.append(weakref.ref(stores[0]))

        def attention(*_: Any) -> torch.Tensor:
            return stores[0]

        with models.attention_of(model, attention):
            raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(full_decode, "model_of", on_cpu)
    monkeypatch.setattr(full_decode, "free_device_bytes", lambda _: 1 << 60)
    monkeypatch.setattr(full_decode, "time_full", time_full)
    assert full_step("tiny", 1, 100, 1) is DOES_NOT_FIT
    gc.collect()
    assert held[0]() is None
    calls = len(held)
    assert full_step("tiny", 1, 100, 1) is DOES_NOT_FIT and len(held) == calls  # said once


@pytest.mark.parametrize("side", gpu_decode.SIDES)
def test_a_row_has_the_sides_that_were_asked_for(side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_decode, "model_of", on_cpu)
    monkeypatch.setattr(gpu_decode, "full_step", lambda *_: Full(7.0, 8.0, 9.0, "flash", 2.0))
    monkeypatch.setattr(gpu_decode, "retrieval", lambda *_: Retrieval([3.0, 4.0, 5.0], 0.5, 1.5, bus_bytes=6e5))
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (1 << 30, 4 << 30))
    row = gpu_decode.measure("tiny", None, 1000, 2, "full" if side == "full" else "product", 30, side)
    assert (row.layers, row.total_gib) == (4, 4.0) and row.weights_gib > 0
    assert isnan(row.full_p50_ms) == (side == "retrieval") and isnan(row.full_device_gib) == (side == "retrieval")
    assert isnan(row.retrieval_p50_ms) == (side == "full") == isnan(row.host_gib)
    assert row.speedup == 2.0 if side == "both" else isnan(row.speedup)
    full_bytes = weight_bytes(TINY) + 4 * 2 * 1000 * 2 * 2 * 128 * 2  # layers, sequences, tokens, KV heads, K and V, D, bf16
    if side == "retrieval":
        assert isnan(row.full_bytes) and isnan(row.full_roofline_ms) and isnan(row.full_p20_ms)
    else:
        assert (row.full_bytes, row.full_roofline_ms) == (full_bytes, full_bytes / 1e9)
        assert (row.full_p20_ms, row.full_p80_ms) == (7.0, 9.0)
    if side == "full":
        assert isnan(row.device_bytes) and isnan(row.bus_bytes) and isnan(row.roofline_ms)
    else:
        assert (row.bus_bytes, row.roofline_ms, row.retrieval_p20_ms) == (6e5, 0.6, 3.0)  # the bus is the slower one here
        assert weight_bytes(TINY) < row.device_bytes


def test_a_compiled_row_says_so_and_both_sides_are(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def full(*arguments: Any) -> Full:
        asked.append(arguments[4:])
        return Full(7.0, 8.0, 9.0, "flash", 2.0)

    def retrieval(*arguments: Any) -> Retrieval:
        asked.append(arguments[3:])
        return Retrieval([4.0], 0.5, 1.5, 0.25)

    monkeypatch.setattr(gpu_decode, "model_of", on_cpu)
    monkeypatch.setattr(gpu_decode, "full_step", full)
    monkeypatch.setattr(gpu_decode, "retrieval", retrieval)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (1 << 30, 4 << 30))
    assert gpu_decode.measure("tiny", None, 1000, 2, "product+compiled", 30).config == "product+compiled"
    assert asked[0] == (True,) and asked[1][:3] == ("product", 30, True) and type(asked[1][3]) is Gaussian
    assert gpu_decode.measure("tiny", None, 1000, 2, "full+compiled", 30, "full").config == "full+compiled"
    assert gpu_decode.measure("tiny", None, 1000, 2, "product", 30, "retrieval").config == "product"
    assert asked[-1][:3] == ("product", 30, False)
    row = gpu_decode.measure("tiny", None, 1000, 2, "product-reuse+turning+compiled", 30, "retrieval")
    assert row.config == "product-reuse+turning+compiled" and asked[-1][:3] == ("product-reuse", 30, True)
    assert type(asked[-1][3]) is Turning
    layer = LayerTrace(*(torch.zeros(shape) for shape in ((1, 42, 128), (1, 42, 128), (2, 2, 128), (2, 4, 128))))
    trace = Trace(TraceInfo("model", 40, 2, 0.1, (0,)), {0: layer})
    row = gpu_decode.measure("tiny", None, 1000, 2, "product+traced+compiled", 30, "retrieval", trace)
    assert row.config == "product+traced model 40+compiled" and type(asked[-1][3]) is Traced
    sizes = ((1, 42, 64), (1, 42, 64), (2, 2, 64), (2, 4, 64))
    small = Trace(trace.info, {0: LayerTrace(*(torch.zeros(size) for size in sizes))})
    with pytest.raises(ParameterError, match="expected heads of 128 numbers, got 64"):
        gpu_decode.measure("tiny", None, 1000, 2, "product+traced", 30, "both", small)
    assert row.reused_share == 0.25


def test_exact_attention_is_that_of_scaled_dot_product_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    model = on_cpu("tiny", 2, 300)
    attention = full_decode.FullAttention(model, 300, 2)
    query = torch.randn(2, 4, 1, 128, dtype=torch.bfloat16)
    expected = F.scaled_dot_product_attention(query.float(), *attention.stores[0].float(), scale=0.2, enable_gqa=True)
    made = full_decode.exact_attention(query, *attention.stores[0], 0.2)
    torch.testing.assert_close(made, expected.bfloat16())
    exact = full_decode.exact_attention
    attention.checked = True
    with models.attention_of(model, attention), torch.no_grad():
        attention.step()
        monkeypatch.setattr(full_decode, "exact_attention", lambda *asked: 1.05 * exact(*asked))
        with pytest.raises(AssertionError, match=r"full attention, layer 0: differs by 0\.04"):
            attention.step()


def test_compiled_modules_that_compute_something_else_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = on_cpu("tiny", 2, 300)
    assert check_compiled(model, "eager") < COMPILED_TOLERANCE

    @contextmanager
    def wrong(model: Any, backend: str) -> Iterator[None]:
        model.model.norm.weight.data.neg_()
        yield

    monkeypatch.setattr(verify, "compiled_modules", wrong)
    with pytest.raises(AssertionError, match="logits with compiled modules"):
        check_compiled(model)


def test_rows_that_the_host_cannot_hold_leave_the_other_side(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def retrieval(*_: Any) -> Retrieval:
        raise HostMemoryError(2, 1, 1000)

    monkeypatch.setattr(gpu_decode, "model_of", on_cpu)
    monkeypatch.setattr(gpu_decode, "full_step", lambda *_: Full(7.0, 8.0, 9.0, "flash", 2.0))
    monkeypatch.setattr(gpu_decode, "retrieval", retrieval)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (1 << 30, 4 << 30))
    row = gpu_decode.measure("tiny", None, 1000, 2, "product", 30)
    assert row.full_p50_ms == 8.0 and isnan(row.retrieval_p50_ms) and isnan(row.retrieval_worst_ms)
    assert "host memory" in capsys.readouterr().out


def test_rounds_of_calls_are_timed_one_after_another() -> None:
    first, second = (gpu_generate.measure("tiny", 2, 700, "full", 2, 6, False, call, "cpu") for call in (1, 2))
    assert (first.call, second.call) == (1, 2) and second.as_first == 6
    for row in (first, second):
        assert (row.layers, row.users, row.new_tokens) == (2, 2, 6)
        assert 0 < row.first_token_s < row.wall_s and 0 < row.median_ms <= row.longest_ms
        assert row.first_token_s * 1e3 + row.ms_per_token * 5 >= row.longest_ms
    gpu_generate._session.cache_clear()


def test_a_cache_is_filled_as_a_prompt_fills_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_decode, "_check_device", lambda *_: None)
    model, method = on_cpu("tiny", 2, 700), models.method_of("balanced-512-rest-reuse", 700)
    source = Gaussian(ModelSignature("llama", 2, 4, 2, 128), "cpu")
    cache = RetrievalCache(model.config, method)
    cache.statistics = gpu_decode._statistics(model, source)
    gpu_decode.fill(cache, 700, 2, 8, source)
    assert cache.get_seq_length() == 700
    for layer in cache.retrieval_layers:
        assert layer.state is not None
        store = layer.state.store
        held = [pool.length + near for pool, near in zip(store.host, store.resident.lengths, strict=True)]
        assert held == [700, 700] and store.host[0].length > 0

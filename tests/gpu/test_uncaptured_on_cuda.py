"""Steps without a graph on a GPU: kernels against the reference, copies that nobody waits for, memory that does not grow."""

from __future__ import annotations

import gc
import random
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import kvrecall
from kvrecall import engine
from kvrecall.attend import attend_rows, reference
from kvrecall.cache import host_memory
from kvrecall.cache.copies import rows_to_device
from kvrecall.cache.host_memory import Region
from kvrecall.cache.zones import ZoneSizes
from kvrecall.core import cuda
from kvrecall.core.errors import DeviceMemoryError
from kvrecall.core.structs import AttentionParams, HostRows, Partial, Rows
from kvrecall.index.base import LayerShape
from kvrecall.layer.pipeline import decode_step, prefill_layer
from kvrecall.layer.state import LayerState
from kvrecall.merge import merge
from tests.blocks import store
from tests.index.sphere.with_statistics import usual
from tests.strategies import DTYPES, HEAD_DIMS, gaussian, generator

pytestmark = pytest.mark.gpu
ZONES: Any = {"sink_tokens": 4, "local_tokens": 16, "update_interval": 8, "full_attention_threshold": 0}
CUDA = torch.device("cuda")


NEAR = {torch.float32: 1e-5, torch.float16: 2**-10, torch.bfloat16: 2**-7}


def close(made: Partial, expected: Partial, dtype: torch.dtype = torch.float32) -> None:
    """Both sum in fp32, in another order; weights are rounded to the values' dtype before they meet them."""
    torch.testing.assert_close(made.out, expected.out, atol=NEAR[dtype], rtol=NEAR[dtype])
    torch.testing.assert_close(made.lse, expected.lse, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dim", "group"), list(zip(HEAD_DIMS, (8, 4, 1, 3, 7, 2, 16), strict=True)))
def test_attention_to_resident_rows(dtype: str, dim: int, group: int) -> None:
    widths = ((1, 0.0), (111, 5.0), (832, 0.0), (5000, 0.0))
    for width, softcap in widths if dtype == "bf16" else widths[1::2]:
        queries = gaussian(1, 3, 2 * group, 1, dim).cuda().to(DTYPES[dtype])
        lengths = torch.tensor([width, width // 2, 0], dtype=torch.int32, device=CUDA).unsqueeze(1).expand(-1, 2)
        kv = gaussian(2, 3, 2, width, 2, dim).cuda().to(DTYPES[dtype])
        kv[1, :, width // 2 :] = float("nan")  # what is not real is never read
        rows = Rows(kv, lengths)
        close(
            attend_rows(queries, rows, dim**-0.5, softcap),
            reference.attend_rows(queries, Rows(kv.nan_to_num(), lengths), dim**-0.5, softcap),
            DTYPES[dtype],
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_attention_to_rows_of_the_host(dtype: str, dim: int) -> None:
    kind = DTYPES[dtype]
    made = store(2, 2, dim, kind, "cuda")
    stored = [gaussian(b, 2, 500, 2, dim).to(kind).cuda() for b in range(2)]
    for pool, rows, size in zip(made.host, stored, (37, 500), strict=True):
        for piece in rows.split(size, 1):
            pool.append(piece.clone())
    ids = torch.full((2, 2, 90), -1, dtype=torch.int32)
    for b in range(2):
        for h in range(2):
            ids[b, h, : 90 - 40 * h] = torch.randperm(500, generator=generator(h))[: 90 - 40 * h].sort().values
    table = made.ensure_blocks(500)
    assert table.blocks.is_cuda and table.blocks.shape == (2, 8)
    index = ids.long().clamp_min(0)
    kv = torch.stack([torch.stack([stored[b][h, index[b, h]] for h in range(2)]) for b in range(2)])
    lengths = (ids >= 0).sum(-1, dtype=torch.int32).cuda()
    queries = gaussian(9, 2, 8, 1, dim).cuda().to(kind)
    close(
        attend_rows(queries, HostRows(ids.cuda(), table), dim**-0.5),
        reference.attend_rows(queries, Rows(kv, lengths), dim**-0.5),
        kind,
    )


def test_merged_parts() -> None:
    parts = [Partial(gaussian(i, 2, 3, 1, 80), gaussian(100 + i, 2, 3, 1)) for i in range(5)]
    parts[1] = Partial.empty_like(parts[1].out)
    made = merge([Partial(p.out.cuda(), p.lse.cuda()) for p in parts])
    close(Partial(made.out.cpu(), made.lse.cpu()), merge(parts))


def test_addresses_beyond_two_to_the_31() -> None:
    """1.1 million tokens of 8 heads of 128: 2.3 billion numbers in one zone, the last rows of the last head among them."""
    tokens, kind = 1_100_000, torch.bfloat16
    pool, last = store(1, 8, 128, kind, "cuda", block_size=1024).host[0], gaussian(1, 8, 32, 2, 128).to(kind)
    pool.reserve(tokens)
    pool.make_room(1)
    pool.extend(tokens)
    ids = torch.arange(tokens - 32, tokens, dtype=torch.int32).expand(1, 8, -1).contiguous()
    pool.write(tokens - 32, last)
    table = pool.table(CUDA)
    assert table is not None and int(table.blocks.max()) * table.rows[0].numel() > 2**31
    queries, lengths = gaussian(2, 1, 32, 1, 128).to(kind).cuda(), torch.full((1, 8), 32, dtype=torch.int32, device=CUDA)
    rows = Rows(last.cuda().unsqueeze(0), lengths)
    close(attend_rows(queries, HostRows(ids.cuda(), table), 0.1), reference.attend_rows(queries, rows, 0.1), kind)
    assert torch.equal(pool.keys(tokens - 32, tokens, CUDA), rows.kv[0, :, :, 0])


def tiny(device: str, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256, num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=2, head_dim=64, intermediate_size=256,
        vocab_size=512, max_position_embeddings=8192,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval().to(device, dtype)


METHODS = {
    "in-place": kvrecall.Exact(top_k=24, **ZONES),
    "kept": kvrecall.Exact(top_k=24, fetch="direct:reuse=true", **ZONES),
    "staged": kvrecall.Exact(top_k=24, fetch="staged", **ZONES),
    "stride": kvrecall.Exact(top_k=24, trigger="fixed-stride:steps=5", **ZONES),
    "per-head": kvrecall.Exact(top_k=24, gqa="per_head", **ZONES),
    "static": kvrecall.PRKV(top_k=24, page_tokens=4, window_tokens=16, refresh_interval=10, **ZONES),
    "covering": kvrecall.ParisKV(top_k=10_000, **ZONES),
    "full": kvrecall.Full(**ZONES),
}


@pytest.mark.parametrize(
    ("name", "ragged"), [(name, True) for name in METHODS] + [(name, False) for name in ("in-place", "static", "full")]
)
def test_generated_tokens_are_those_of_the_cpu(name: str, ragged: bool) -> None:
    prompt = torch.randint(5, 500, (2, 150), generator=generator(1))
    mask = torch.ones_like(prompt)
    if ragged:
        mask[1, :70] = 0
    # Where tokens are ranked, one near-tie in ten thousand may fall the other way on another device; few steps meet none.
    new_tokens = 60 if name in ("covering", "full") else 24
    answers, counters = [], []
    for device in ("cpu", "cuda"):
        model = tiny(device)
        cache = kvrecall.RetrievalCache(model.config, METHODS[name])
        made = engine.generate(
            model, None, prompt.to(device), cache, max_new_tokens=new_tokens, chunk_tokens=64, attention_mask=mask.to(device),
            eos_token_id=511, capture=False,
        )  # fmt: skip
        answers.append(made.new_tokens)
        counters.append(cache.stats().total.counters)
    assert answers[0] == answers[1]
    for field in ("steps", "searches", "attended_tokens", "retrieved_tokens", "static_tokens", "bytes_fetched"):
        assert getattr(counters[1], field) == pytest.approx(getattr(counters[0], field), rel=0.02), field
    assert (counters[1].bytes_to_host > 0) == (counters[1].bytes_to_device > 0) == (name != "full")


def layer(method: kvrecall.Method, dtype: torch.dtype = torch.bfloat16) -> LayerState:
    return LayerState(0, LayerShape(2, 8, 2, 64, dtype, CUDA, usual(2, 4, 64)), method)


def tokens(seed: int, count: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    made = torch.Generator("cuda").manual_seed(seed)
    return [torch.randn(2, heads, count, 64, device=CUDA, generator=made).to(dtype) for heads in (8, 2, 2)]


STEADY = {
    "in-place": kvrecall.ParisKV(top_k=24, **ZONES),
    "kept": kvrecall.ParisKV(top_k=24, fetch="direct:reuse=true", **ZONES),
    "balanced": kvrecall.methods.get("pariskv-balanced", top_k=24, **ZONES),
}


@pytest.mark.parametrize("name", STEADY)
def test_no_memory_grows_over_two_thousand_steps(name: str) -> None:
    """The zone grows by every token, so the whole length is reserved; beyond that, nothing may."""
    state, params = layer(STEADY[name]), AttentionParams(0.125)
    assert state._in_place == (name != "kept")
    for pool in state.store.host:
        pool.reserve(3000)
    assert state.index is not None
    state.index.reserve(3000)
    prefill_layer(state, *tokens(0, 200), None, params)
    new = [tokens(1 + i, 1) for i in range(8)]

    def run(steps: int) -> None:
        for number in range(steps):
            decode_step(state, *new[number % 8], None, params)

    run(400)
    torch.cuda.synchronize()
    host = state.store.ensure_blocks(1)
    before = torch.cuda.memory_allocated()
    run(2000)
    torch.cuda.synchronize()
    # The scratch of the search grows with the candidates, which follow the zone: a few bytes per token and KV head.
    assert torch.cuda.memory_allocated() - before < 64 * 2000 * 2 * 2
    now = state.store.ensure_blocks(1)
    assert now.rows.data_ptr() == host.rows.data_ptr() and torch.equal(now.blocks, host.blocks)
    assert state.store.zones(0).total == 2600 and all(pool.length > 2500 for pool in state.store.host)


@pytest.mark.parametrize("on_device", [True, False], ids=["rows-on-device", "rows-on-host"])
def test_the_host_waits_for_nothing_in_a_step(on_device: bool) -> None:
    """Attention to the whole zone, updates included: torch raises where the host would wait for the GPU."""
    method = kvrecall.Full(**ZONES | {"local_tokens": 64})
    state, params = layer(method), AttentionParams(0.125)
    state.store.place(on_device)
    for pool in state.store.host:
        pool.reserve(1000)
    prefill_layer(state, *tokens(0, 300), None, params)
    for number in range(3):
        decode_step(state, *tokens(1 + number, 1), None, params)
    steps = [tokens(100 + number, 1) for number in range(20)]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for new in steps:
            decode_step(state, *new, None, params)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert state.stats.steps == 23 and state.store.on_device == on_device


def course(seed: int, slow: Tensor | None, steps: int = 400) -> list[Tensor]:
    """Random appends, updates, crops, copies and reads of a tiny window. slow: work that keeps the GPU behind the host."""
    draw, own, made = random.Random(seed), store(2, 2, 64, torch.float32, "cuda", 16, ZoneSizes(2, 4, 3)), []
    numbers = torch.Generator("cuda").manual_seed(seed)
    for _ in range(steps):
        if slow is not None:
            slow @ slow
        what, b = draw.random(), draw.randrange(2)
        if what < 0.6:
            own.append_step(*(torch.randn(2, 2, 1, 64, device=CUDA, generator=numbers) for _ in range(2)), None)
            own.evict(0)
            own.evict(1)
        elif what < 0.7:
            chunk = torch.randn(2, draw.randrange(1, 40), 64, device=CUDA, generator=numbers)
            own.append_chunk(b, chunk, -chunk)
        elif what < 0.8:
            own.crop(b, max(0, own.zones(b).total - draw.randrange(30)))
        elif what < 0.9:
            own = own.select(draw.choice([[0, 1], [1, 0], [1, 1], [0, 0]]))
        elif draw.random() < 0.5:
            made.append(torch.cat([rows_to_device(block, CUDA) for block in own.blocks(b, on_device=True)], 1))
        else:
            made.append(torch.cat([block.cpu() for block in own.blocks(b)], 1))
        if slow is None:
            torch.cuda.synchronize()
    return [x.cpu() for x in made]


@pytest.mark.parametrize("seed", range(6))
def test_rows_on_their_way_are_waited_for(seed: int) -> None:
    made = course(seed, torch.randn(2048, 2048, device=CUDA))
    expected = course(seed, None)
    assert len(made) > 20 and all(torch.equal(x, y) for x, y in zip(made, expected, strict=True))


def test_an_update_returns_before_its_rows_have_arrived() -> None:
    pool, rows = store(1, 2, 64, torch.bfloat16, "cuda").host[0], torch.randn(2, 4096, 2, 64, device=CUDA).bfloat16()
    pool.make_room(4096)
    big = torch.randn(8192, 8192, device=CUDA)
    torch.cuda.synchronize()
    for _ in range(20):
        big @ big
    pool.append(rows)
    assert pool._rows._pending is not None and not pool._rows._pending.query()
    assert torch.equal(pool.gather(torch.arange(4096).expand(2, -1)), rows.cpu())


class Refusing:
    """A system that pins nothing."""

    def __init__(self) -> None:
        self._cudart: Any = torch.cuda.cudart()

    def __getattr__(self, name: str) -> Any:
        return (lambda *_: 2) if name == "cudaHostRegister" else getattr(self._cudart, name)


def test_generation_without_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = torch.randint(5, 500, (1, 300), generator=generator(2)).cuda()
    answers = []
    for refuse in (False, True):
        model = tiny("cuda")  # host memory belongs to a model: another one asks for its own
        with pytest.MonkeyPatch.context() as patch:
            if refuse:
                patch.setattr(cuda, "_warned", False)
                refusing = Refusing()
                patch.setattr(torch.cuda, "cudart", lambda refusing=refusing: refusing)
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                cache = kvrecall.RetrievalCache(model.config, kvrecall.ParisKV(top_k=24, **ZONES))
                capture = None if refuse else False  # what cannot be captured without pinned memory is not
                made = engine.generate(model, None, prompt, cache, max_new_tokens=40, eos_token_id=511, capture=capture)
            assert sum("expected to pin" in str(x.message) for x in told) == refuse  # one, not one per layer
        answers.append(made.new_tokens)
        state = cache.retrieval_layers[0].state
        assert state is not None and state.store.memory.pinned != refuse
    assert answers[0] == answers[1]


def test_a_real_refusal_leaves_no_error_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registering the same pages twice is refused by CUDA itself; the next launch must not be blamed for it."""
    monkeypatch.setattr(cuda, "_warned", False)
    region = Region((1 << 20,), torch.uint8, CUDA)
    region.commit(1 << 20)
    registered: list[int] = []
    with pytest.warns(RuntimeWarning, match="expected to pin"):
        assert not host_memory._register(region.tensor, registered)
    assert not registered
    assert torch.ones(3, device=CUDA).sum() == 3
    assert region.tensor.is_pinned()


def test_memory_is_given_back_with_the_cache() -> None:
    model = tiny("cuda")
    runtime, live = torch.cuda.cudart(), set()

    class Watched:
        def cudaHostRegister(self, address: int, count: int, flags: int) -> object:
            live.add(address)
            return runtime.cudaHostRegister(address, count, flags)

        def cudaHostUnregister(self, address: int) -> object:
            live.remove(address)
            return runtime.cudaHostUnregister(address)

        def __getattr__(self, name: str) -> object:
            return getattr(runtime, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "cudart", Watched)
        cache: Any = kvrecall.RetrievalCache(model.config, kvrecall.ParisKV(top_k=24, **ZONES))
        prompt = torch.randint(5, 500, (1, 300), generator=generator(2)).cuda()
        engine.generate(model, None, prompt, cache, max_new_tokens=20, eos_token_id=511, capture=False)
        fork = cache.fork()
        assert live
        del cache
        gc.collect()
        assert live  # the fork reads them
        del fork
        gc.collect()
        assert not live


def test_device_memory_that_runs_out_is_explained_and_nothing_has_grown() -> None:
    model = tiny("cuda")
    prompt = torch.randint(5, 500, (1, 300), generator=generator(2)).cuda()
    too_many = torch.cuda.get_device_properties(0).total_memory // (2 * 48)  # 48 bytes per token and KV head, in three layers
    answers = []
    for fail in (False, True):
        cache = kvrecall.RetrievalCache(model.config, kvrecall.ParisKV(top_k=24, **ZONES))
        engine.prefill(model, prompt, cache)
        if fail:
            before = torch.cuda.memory_allocated()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("kvrecall.backends.transformers.cache.available_host_bytes", lambda: 2**62)
                with pytest.raises(DeviceMemoryError, match=r"the cache needs .* are free on cuda"):
                    cache.reserve(too_many)
            assert cache.get_seq_length() == 300 and torch.cuda.memory_allocated() == before
        made = engine.generate(model, None, prompt, cache, max_new_tokens=20, eos_token_id=511, capture=False)
        answers.append(made.new_tokens)
    assert answers[0] == answers[1]


def test_a_table_that_cannot_grow_gives_the_tokens_back() -> None:
    """A real refusal by the GPU, in the middle of a prompt."""
    model, method = tiny("cuda"), kvrecall.ParisKV(top_k=24, **ZONES)
    huge = torch.cuda.get_device_properties(0).total_memory
    prompt = torch.randint(5, 500, (1, 300), generator=generator(2)).cuda()
    answers = []
    for fail in (False, True):
        cache = kvrecall.RetrievalCache(model.config, method)
        if fail:
            engine.prefill(model, prompt[:, :100], cache)
            state: Any = cache.retrieval_layers[1].state
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(state.index, "append", lambda *_: torch.empty(huge, dtype=torch.int64, device="cuda"))
                with pytest.raises(DeviceMemoryError, match="layer 1 needs"):
                    engine.prefill(model, prompt[:, :200], cache)
            assert {x.get_seq_length() for x in cache.layers} == {100}
        engine.prefill(model, prompt[:, :100], cache)
        engine.prefill(model, prompt[:, :200], cache)
        made = engine.generate(model, None, prompt, cache, max_new_tokens=20, eos_token_id=511, capture=False)
        answers.append(made.new_tokens)
    assert answers[0] == answers[1]

"""Layers that search nothing, whose rows lie on a GPU: kernels against the reference, steps, captured steps, refused memory."""

from __future__ import annotations

import ctypes
import gc
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

import kvrecall
from kvrecall import engine
from kvrecall.attend import reference
from kvrecall.backends.transformers.capture import runner
from kvrecall.cache import device_memory
from kvrecall.core.structs import HostTable
from kvrecall.layer.pipeline import decode_step, prefill_layer
from tests.blocks import host_table, store
from tests.gpu.test_uncaptured_on_cuda import CUDA, ZONES, close, tiny
from tests.layers import PARAMS, state, tokens
from tests.one_layer import params
from tests.strategies import DTYPES, HEAD_DIMS, gaussian, generator

pytestmark = pytest.mark.gpu
FULL = kvrecall.Full(**ZONES)
LOUISKV = kvrecall.LouisKV(top_k=24, dense_layers=(0, 2), cluster_tokens=4, stretch_tokens=32, max_segment_tokens=8, **ZONES)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dim", "group"), list(zip(HEAD_DIMS, (8, 4, 1, 3, 7, 2, 16), strict=True)))
def test_attention_to_whole_zones(dtype: str, dim: int, group: int) -> None:
    from kvrecall.attend.zones import attend_zones

    kind = DTYPES[dtype]
    for counts, block, softcap in (([1, 0, 111], 16, 0.0), ([832, 1024, 5000], 1024, 5.0), ([20_000], 4096, 0.0)):
        stored = [gaussian(b, 2, count, 2, dim).to(kind) for b, count in enumerate(counts)]
        table, lengths = host_table(stored, block), torch.tensor(counts, dtype=torch.int32, device=CUDA)
        near = HostTable(table.rows.cuda(), table.blocks.cuda())  # NaN where nothing was stored
        queries = gaussian(9, len(counts), 2 * group, 1, dim).cuda().to(kind)
        made = attend_zones(queries, near, lengths, max(counts), dim**-0.5, softcap)
        clean = HostTable(near.rows.nan_to_num(), near.blocks)
        close(made, reference.attend_zones(queries, clean, lengths, max(counts), dim**-0.5, softcap), kind)


def test_addresses_beyond_two_to_the_31() -> None:
    """1.1 million tokens of 8 heads of 128 in one zone: 2.3 billion numbers."""
    from kvrecall.attend.zones import attend_zones

    count, kind = 1_100_000, torch.bfloat16
    made = store(1, 8, 128, kind, "cuda", block_size=1024, on_device=True)
    zone = made.host[0]
    zone.reserve(count)
    for seed in range(count // 100_000):
        zone.append(gaussian(seed, 8, 1000, 2, 128).to(kind).cuda().repeat(1, 100, 1, 1))
    assert made.on_device and int(zone.block_table.blocks[-1]) * made.memory.rows[0].numel() > 2**31
    queries = gaussian(99, 1, 32, 1, 128).to(kind).cuda()
    table, lengths = made.whole_zones([0])
    got = attend_zones(queries, table, lengths, count, 0.1)
    rows = torch.cat(list(zone.blocks(on_device=True)), 1)
    out, lse = [], []
    for h in range(8):  # a head at a time, so that fp32 logits and values fit
        keys, values = rows[h].unbind(1)
        logits = queries[0, 4 * h : 4 * h + 4, 0].float() @ keys.float().T * 0.1
        out.append(logits.softmax(-1) @ values.float())
        lse.append(logits.logsumexp(-1))
    torch.testing.assert_close(got.out[0, :, 0], torch.cat(out), atol=2**-7, rtol=2**-7)
    torch.testing.assert_close(got.lse[0, :, 0], torch.cat(lse), atol=1e-4, rtol=1e-4)


def test_steps_and_chunks_are_those_of_rows_on_the_host() -> None:
    near, far = (_layer() for _ in range(2))
    far.store.place(False)
    for number, count in enumerate([300, *[1] * 20, 77, *[1] * 20]):
        inputs = [x.cuda() for x in tokens(number, 2, count)]
        work = decode_step if count == 1 else prefill_layer
        outs = [work(layer, *inputs, None, PARAMS) for layer in (near, far)]
        torch.testing.assert_close(outs[0], outs[1], atol=1e-4, rtol=1e-4)
    assert near.store.on_device and not far.store.on_device
    assert near.stats.bytes_to_device == near.stats.bytes_to_host == 0 < far.stats.bytes_to_device
    for b in range(2):
        assert torch.equal(*(torch.cat([block.cuda() for block in layer.store.blocks(b)], 1) for layer in (near, far)))


def _layer() -> Any:
    from kvrecall.index.base import LayerShape
    from kvrecall.layer.state import LayerState

    like = state(FULL, 2).shape
    shape = LayerShape(2, like.query_heads, like.kv_heads, like.head_dim, torch.float32, CUDA)
    return LayerState(0, shape, FULL)


def answers(model: LlamaForCausalLM, method: kvrecall.Method, ids: torch.Tensor, **options: Any) -> tuple[Any, Any]:
    cache = kvrecall.RetrievalCache(model.config, method)
    made = engine.generate(model, None, ids, cache, max_new_tokens=40, chunk_tokens=64, **options).new_tokens
    return made, cache


METHODS = {"full": FULL, "dense-layers": LOUISKV}


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_captured_generation_equals_the_uncaptured_one(method: kvrecall.Method) -> None:
    model, ids = tiny("cuda"), torch.randint(5, 500, (2, 150), generator=generator(3))
    expected, _ = answers(model, method, ids.cuda(), capture=False)
    made, cache = answers(model, method, ids.cuda(), capture=True)
    assert made == expected
    near = [layer.state.store.on_device for layer in cache.retrieval_layers]
    assert near == [not method.searches(number) for number in range(3)]


@pytest.mark.parametrize("refused_from", [1, 2, 3])
def test_a_refusal_in_the_middle_of_a_prompt(refused_from: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids, demands = tiny("cuda"), torch.randint(5, 500, (1, 2000), generator=generator(4)).cuda(), [0]
    expected, _ = answers(model, FULL, ids, capture=False)

    def room(_: torch.device) -> int:
        demands[0] += 1
        return 1 << 60 if demands[0] < refused_from else 0

    monkeypatch.setattr("kvrecall.cache.block_rows.room_for_rows", room)
    monkeypatch.setattr("kvrecall.cache.block_rows._warned", True)
    made, cache = answers(model, FULL, ids)
    assert made == expected
    assert not all(layer.state.store.on_device for layer in cache.retrieval_layers)


class WatchedDriver:
    """CUDA's driver, and the bytes of each piece of memory that it has given and not got back."""

    def __init__(self) -> None:
        self.own, self.live = device_memory.cuda_driver(), dict[int, int]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)

    def cuMemCreate(self, handle: Any, count: ctypes.c_size_t, *more: Any) -> int:
        status = self.own.cuMemCreate(handle, count, *more)
        if not status:
            self.live[handle._obj.value] = count.value
        return status

    def cuMemRelease(self, handle: ctypes.c_uint64) -> int:
        self.live.pop(handle.value, None)
        return self.own.cuMemRelease(handle)


def test_a_cache_that_is_gone_leaves_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the driver says is free would be what other processes leave, too."""
    driver = WatchedDriver()
    monkeypatch.setattr(device_memory, "cuda_driver", lambda: driver)
    model, ids = tiny("cuda"), torch.randint(5, 500, (1, 4000), generator=generator(5)).cuda()
    allocated = []
    for _ in range(4):
        _, cache = answers(model, FULL, ids)
        assert cache.stats().total.host_bytes == 0
        assert sum(driver.live.values()) >= 3 * 4000 * 2 * 2 * 64 * 4  # layers, tokens, heads, K and V, D, fp32
        del cache
        runner.release(model)  # recorded steps keep the memory of their blocks
        gc.collect()
        torch.cuda.synchronize()
        assert not driver.live
        allocated.append(torch.cuda.memory_allocated())
    assert allocated[1] == allocated[-1]


def test_softcap_and_learned_sinks() -> None:
    near, far = (_layer() for _ in range(2))
    far.store.place(False)
    own = params(64, softcap=5.0, sink_logits=torch.arange(4.0, device=CUDA))
    for number, count in enumerate([200, 1, 1, 1]):
        inputs = [x.cuda() for x in tokens(number, 2, count)]
        work = decode_step if count == 1 else prefill_layer
        outs = [work(layer, *inputs, None, own) for layer in (near, far)]
        torch.testing.assert_close(outs[0], outs[1], atol=1e-4, rtol=1e-4)

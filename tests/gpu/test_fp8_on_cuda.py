"""Rows in eight bits on a GPU: stored as the CPU stores them, read by every kernel, uncaptured and in a graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import kvrecall
from kvrecall import RetrievalCache, engine
from kvrecall.attend import attend_rows, reference
from kvrecall.cache.copies import prefetch_pieces, read_keys, rows_to_device
from kvrecall.core.fp8 import Fp8Rows, as_stored, quantised
from kvrecall.core.structs import HostRows, Rows
from kvrecall.fetch import Direct, Staged, fetch_rows
from kvrecall.index.base import LayerShape
from kvrecall.index.query_centroids import kernels
from kvrecall.layer.pipeline import decode_step, prefill_layer
from kvrecall.layer.state import LayerState
from tests.blocks import store
from tests.gpu.test_uncaptured_on_cuda import CUDA, close, tiny
from tests.index.sphere.with_statistics import usual
from tests.one_layer import methods, normal, params
from tests.strategies import DTYPES, generator

pytestmark = pytest.mark.gpu
ZONES: dict[str, Any] = {"sink_tokens": 4, "local_tokens": 16, "update_interval": 8, "full_attention_threshold": 0}


def zone(dim: int, dtype: torch.dtype, spread: float = 0.0) -> tuple[Any, torch.Tensor]:
    """A zone of 500 rows in blocks of 64, stored in pieces from the GPU, and the rows as they are read back, on the CPU.
    spread: their sizes go from 10^-spread to 10^spread."""
    sizes = torch.logspace(-spread, spread, 500).view(-1, 1, 1)
    rows = (torch.randn(3, 500, 2, dim, generator=generator(dim)) * sizes).to(dtype)
    pool = store(1, 3, dim, dtype, "cuda", small=True).host[0]
    for piece in rows.split(37, 1):
        back = pool.append(piece.cuda())
        assert torch.equal(back.cpu(), as_stored(piece))
    return pool, as_stored(rows)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [32, 80, 128, 256])
def test_rows_of_a_zone(dim: int, dtype: str) -> None:
    """Bit for bit those of the CPU, by whatever way they come back."""
    pool, back = zone(dim, DTYPES[dtype], spread=2.0)
    assert torch.equal(torch.cat(list(pool.blocks()), 1), back)
    near = [rows_to_device(block, CUDA) for block in pool.stored()]
    assert all(block.is_cuda for block in near) and torch.equal(torch.cat(near, 1).cpu(), back)
    keys = torch.empty(3, 400, dim, dtype=DTYPES[dtype], device=CUDA)
    read_keys(pool, 61, keys)
    assert torch.equal(keys.cpu(), back[:, 61:461, 0])
    assert torch.equal(pool.keys(0, 500, CUDA).cpu(), back[:, :, 0])
    with prefetch_pieces(pool, 3, 500, 90, CUDA, torch.clone) as pieces:
        assert torch.equal(torch.cat([piece.cpu() for piece in pieces], 1), back[:, 3:])
    for policy in (Direct(), Staged(), Direct(reuse=True)):
        ids = torch.stack([torch.randperm(500, generator=generator(h))[:90].sort().values for h in range(3)]).int()
        ids[1, 60:] = -1
        fetched, _ = fetch_rows(ids.cuda(), pool, None, policy, CUDA)
        for h in range(3):
            real = ids[h][ids[h] >= 0].long()
            assert torch.equal(fetched.rows[h, : len(real)].cpu(), back[h, real])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [64, 80, 128, 256])
def test_attention_and_scores_in_place(dim: int, dtype: str) -> None:
    pool, back = zone(dim, DTYPES[dtype])
    unrounded = torch.cat([block._replace(dtype=torch.float32).dequantise() for block in pool.stored()], 1)
    table, ids = pool.table(CUDA), torch.full((1, 3, 90), -1, dtype=torch.int32)
    assert table is not None and table.fp8
    for h in range(3):
        ids[0, h, : 90 - 30 * h] = torch.randperm(500, generator=generator(h))[: 90 - 30 * h].sort().values
    kv = torch.stack([back[h, ids[0, h].long().clamp_min(0)] for h in range(3)]).unsqueeze(0).cuda()
    lengths = (ids >= 0).sum(-1, dtype=torch.int32).cuda()
    queries = normal(1, 12, 1, dim).cuda().to(DTYPES[dtype])
    made = attend_rows(queries, HostRows(ids.cuda(), table), dim**-0.5)
    close(made, reference.attend_rows(queries, Rows(kv, lengths), dim**-0.5), DTYPES[dtype])
    scores = kernels.score_rows(queries[0].float().unflatten(0, (3, 4))[:, :, 0], table, ids[0].cuda())
    kv = torch.stack([unrounded[h, ids[0, h].long().clamp_min(0)] for h in range(3)]).unsqueeze(0).cuda()
    exact = queries[0].float().unflatten(0, (3, 4))[:, :, 0] @ kv[0, :, :, 0].float().transpose(1, 2)
    real = (ids[0] >= 0).unsqueeze(1).expand_as(scores)
    torch.testing.assert_close(scores[real], exact[real], atol=1e-2, rtol=1e-4)


def test_what_lies_on_the_host_is_half_as_large() -> None:
    """And what crosses the bus to it."""
    rows = torch.randn(3, 64, 2, 128, generator=generator(0)).bfloat16()
    small = quantised(rows.cuda())
    assert small.nbytes == 3 * 64 * 2 * 132 and isinstance(small, Fp8Rows)
    pool = store(1, 3, 128, torch.bfloat16, "cuda", small=True).host[0]
    pool.append(rows.cuda())
    (held,) = pool.stored()
    torch.cuda.synchronize()  # the GPU's stream waits for the copy, the host does not
    assert held.nbytes == small.nbytes and held.scales.is_pinned()
    assert torch.equal(held.numbers.view(torch.uint8), quantised(rows).numbers.view(torch.uint8))


NAMES = [
    "pariskv-mean_softmax", "pariskv-balanced-max", "prkv-max", "louiskv-max", "ctkvr-mean_softmax", "exact-max", "full",
]  # fmt: skip
LAYERS = {name: methods(top_k=20)[name] for name in NAMES}


@pytest.mark.parametrize("name", LAYERS)
def test_same_ids_and_outputs_as_on_the_cpu(name: str) -> None:
    states = [
        LayerState(0, LayerShape(2, 6, 2, 64, torch.float32, torch.device(d), usual(2, 3, 64), fp8_rows=True), LAYERS[name])
        for d in ("cpu", "cuda")
    ]
    prompt = [normal(2, h, 150, 64, seed=10 + i) for i, h in enumerate((6, 2, 2))]
    for state in states:
        prefill_layer(state, *(x.to(state.shape.device) for x in prompt), None, params())
    near = states[1].store.on_device
    assert near == (name == "full") and states[1].store.memory.fp8 == (not near)
    for step in range(30):
        new = [normal(2, h, 1, 64, seed=100 + 3 * step + i) for i, h in enumerate((6, 2, 2))]
        outs = [decode_step(state, *(x.to(state.shape.device) for x in new), None, params()) for state in states]
        if near:  # on the device rows stay as they are
            continue
        torch.testing.assert_close(outs[1].cpu(), outs[0], atol=2e-3, rtol=2e-3)
        for b in range(2):
            if b in states[0].held:
                expected, found = (state.held[b][0].cpu() for state in states)
                width = min(found.shape[1], expected.shape[1])
                assert torch.equal(found[:, :width], expected[:, :width]), (step, b)
    if not near:
        for b in range(2):
            mine, theirs = (torch.cat(list(state.store.host[b].blocks()), 1) for state in states)
            assert torch.equal(mine, theirs)


GENERATING = {
    "balanced": kvrecall.methods.get("pariskv-balanced", top_k=24, **ZONES),
    "reused": kvrecall.methods.get("pariskv-balanced", top_k=24, fetch="direct:reuse=true", **ZONES),
    "all-read": kvrecall.ParisKV(top_k=24, fetch="direct:reuse=false", **ZONES),
    "means": kvrecall.methods.get("pariskv-balanced", top_k=24, estimate="page-means:page_tokens=8", **ZONES),
    "prkv": kvrecall.PRKV(top_k=24, page_tokens=4, window_tokens=16, refresh_interval=10, **ZONES),
    "louiskv": kvrecall.LouisKV(top_k=24, dense_layers=(), cluster_tokens=4, stretch_tokens=32, max_segment_tokens=8, **ZONES),
    "exact": kvrecall.Exact(top_k=24, **ZONES),
}


@pytest.mark.parametrize("name", GENERATING)
def test_captured_generation_equals_the_uncaptured_one(name: str) -> None:
    """Long enough that tokens that came in captured steps are found and read."""
    prompt, model = torch.randint(5, 500, (2, 150), generator=generator(1)).cuda(), tiny("cuda")
    made, rows = [], []
    for capture in (False, True):
        cache = RetrievalCache(model.config, GENERATING[name], host_rows="fp8")
        answer = engine.generate(
            model, None, prompt, cache, max_new_tokens=48, chunk_tokens=64, eos_token_id=511, capture=capture
        )
        made.append(answer.new_tokens)
        states = [layer.state for layer in cache.retrieval_layers if layer.state is not None]
        rows.append(torch.cat(list(states[-1].store.host[0].blocks()), 1))
        assert states[-1].store.memory.fp8 and cache.stats().total.counters.bytes_to_device > 0
    assert made[0] == made[1]
    torch.testing.assert_close(rows[0], rows[1], atol=0.1, rtol=0.07)  # one step of e4m3 where sums round otherwise


@pytest.mark.parametrize("name", ["balanced", "prkv", "louiskv"])
def test_generated_tokens_are_those_of_the_cpu(name: str) -> None:
    prompt = torch.randint(5, 500, (1, 150), generator=generator(2))
    answers = []
    for device in ("cpu", "cuda"):
        model = tiny(device)
        cache = RetrievalCache(model.config, GENERATING[name], host_rows="fp8")
        made = engine.generate(model, None, prompt.to(device), cache, max_new_tokens=16, chunk_tokens=64, eos_token_id=511)
        answers.append(made.new_tokens)
    assert answers[0] == answers[1]


def test_a_session(tmp_path: Path) -> None:
    model, prompt = tiny("cuda"), torch.randint(5, 500, (1, 2500), generator=generator(3)).cuda()
    cache = RetrievalCache(model.config, GENERATING["balanced"], host_rows="fp8")
    engine.prefill(model, prompt[:, :2400], cache)
    cache.save(tmp_path)
    loaded = RetrievalCache.load(tmp_path, model.config, model=model)
    for own, other in zip(cache.retrieval_layers, loaded.retrieval_layers, strict=True):
        assert own.state is not None and other.state is not None
        assert other.state.store.memory.fp8 and other.state.store.memory.pinned
        for mine, theirs in zip(own.state.store.blocks(0), other.state.store.blocks(0), strict=True):
            assert torch.equal(mine, theirs)
    answers = [engine.generate(model, None, prompt, each, max_new_tokens=12, capture=True) for each in (cache, loaded)]
    assert answers[0].new_tokens == answers[1].new_tokens

"""Searches over pages, clusters and segments on a GPU find what their references find there, and ask nothing of the host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import kvrecall
from kvrecall.core.structs import Budget, Selection
from kvrecall.index.base import LayerShape
from kvrecall.index.query_centroids import CentroidConfig
from kvrecall.index.units import UnitIndex
from kvrecall.index.units.clusters import ClusterConfig
from kvrecall.index.units.pages import PageConfig
from kvrecall.layer.pipeline import decode_step, prefill_layer
from kvrecall.layer.state import LayerState
from kvrecall.select.queries import ObservedQueries
from tests.blocks import store
from tests.one_layer import ZONES, normal, params
from tests.strategies import DTYPES, HEAD_DIMS, gaussian, some_of_each, whole_numbers

pytestmark = pytest.mark.gpu
MODES = ("mean_softmax", "max", "max_softmax", "mean_q")
PAGES = PageConfig(page_tokens=32, gqa="mean_softmax")


@contextmanager
def no_waiting() -> Iterator[None]:
    """Raises where the host waits for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def index_of(config: PageConfig | ClusterConfig, keys: list[Tensor], group: int, segments: tuple[int, ...] = ()) -> UnitIndex:
    """An index on the GPU of one sequence per tensor of keys `[H_kv, n, D]`; the last sum(segments) tokens were generated."""
    heads, _, dim = keys[0].shape
    index = config.build(LayerShape(len(keys), group * heads, heads, dim, keys[0].dtype, torch.device("cuda")))
    index.bind(store(len(keys), heads, dim, keys[0].dtype).host)
    for b, one in enumerate(keys):
        index._sources[b].append(torch.stack([one, one], 2))
        prompt = one.shape[1] - sum(segments)
        index.append(b, one[:, :prompt].cuda())
        for length in segments:
            index.append_generated(b, one[:, prompt : prompt + length].cuda())
            prompt += length
    return index


def both(index: UnitIndex, queries: Tensor, top_k: int) -> tuple[Selection, Selection]:
    """What the kernels find, twice the same and the second time without waiting, and what the reference finds."""
    every, budget = list(range(len(index.lengths))), Budget(top_k, queries.shape[-1] ** -0.5)
    assert index._kernels
    first = index.search(queries, budget, every)
    with no_waiting():
        found = index.search(queries, budget, every)
    assert torch.equal(first.ids, found.ids)
    index._kernels = False
    expected = index.search(queries, budget, every)
    index._kernels = True
    assert torch.equal(found.counts, expected.counts)
    return found, expected


def close(found: Selection, expected: Selection, longest: int) -> None:
    """The same ids, but for one unit at the edge of the budget whose score differs from the next one's by rounding."""
    for a, b in zip(found.ids.flatten(0, 1).tolist(), expected.ids.flatten(0, 1).tolist(), strict=True):
        real = [i for i in a if i >= 0]
        assert real == sorted(set(real)) and a[len(real) :] == [-1] * (len(a) - len(real))
        assert len(set(a) - set(b)) <= longest


def pairs(columns: Sequence[Any]) -> list[tuple[int, str, Any]]:
    """Every head size with every column, and every dtype with both of them."""
    kinds = list(DTYPES)
    return [(dim, kinds[(i + j) % 3], column) for i, dim in enumerate(HEAD_DIMS) for j, column in enumerate(columns)]


@pytest.mark.parametrize(("dim", "dtype", "mode"), pairs(MODES))
def test_pages(dim: int, dtype: str, mode: str) -> None:
    keys = [gaussian(1, 2, 20_011, dim).to(DTYPES[dtype]), gaussian(2, 2, 1_025, dim).to(DTYPES[dtype])]
    index = index_of(PageConfig(page_tokens=32, gqa=mode), keys, 4)
    queries = gaussian(3, 2, 8, dim).to(DTYPES[dtype]).cuda()
    close(*both(index, queries, 768), longest=32)
    index.exclude(0, torch.arange(40, 9000, 35, device="cuda", dtype=torch.int32).expand(2, -1))
    found, expected = both(index, queries, 700)
    close(found, expected, longest=32)
    assert not set(range(40, 9000, 35)) & set(found.ids[0].flatten().tolist())


@pytest.mark.parametrize(("dim", "dtype", "group"), pairs((1, 4, 7, 16)))
def test_clusters_and_segments(dim: int, dtype: str, group: int) -> None:
    keys = [gaussian(1, 2, 9_000, dim).to(DTYPES[dtype]), gaussian(2, 2, 700, dim).to(DTYPES[dtype])]
    config = ClusterConfig(stretch_tokens=2048, iterations=2, size_correction=group == 4)
    index = index_of(config, keys, group, segments=(17, 1, 64))
    queries = gaussian(3, 2, 2 * group, dim).to(DTYPES[dtype]).cuda()
    longest = max(int(index.units(b).sizes.max()) for b in range(2))
    close(*both(index, queries, 512), longest=longest)


SIZES = [(4, 4_000, 118), (1, 40_000, 1000), (2, 30_001, 3), (16, 300_000, 1024)]


@pytest.mark.parametrize(("sizes", "how"), some_of_each(SIZES, [(d, m) for m in ("max", "mean_q") for d in DTYPES], 3))
def test_equal_scores_and_many_units_are_exact(sizes: tuple[int, int, int], how: tuple[str, str]) -> None:
    """Whole numbers: every sum is exact, so ties are ties on both sides."""
    (page, tokens, top_k), (dtype, mode) = sizes, how
    keys = whole_numbers(5, 1, 997, 64).repeat(1, -(-tokens // 997), 1)[:, :tokens].to(DTYPES[dtype])
    index = index_of(PageConfig(page_tokens=page, bounds="min-max", gqa=mode), [keys], 2)
    found, expected = both(index, whole_numbers(6, 1, 2, 64).to(DTYPES[dtype]).cuda(), top_k)
    assert torch.equal(found.ids, expected.ids)


def test_a_graph_follows_units_that_are_added() -> None:
    """The captured search reads the plan: rewriting it makes the graph search other units."""
    keys = [gaussian(1, 2, 6_400, 128).bfloat16()]
    index = index_of(PAGES, keys, 4)
    queries = gaussian(3, 1, 8, 128).bfloat16().cuda()
    gpu, plan, fire = index.gpu_search(queries, 256, [0])
    gpu.launch(queries, plan, fire, 0.1, 256)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gpu.launch(queries, plan, fire, 0.1, 256)
    more = gaussian(4, 2, 320, 128).bfloat16() * 2
    index._sources[0].append(torch.stack([more, more], 2))
    index.append(0, more.cuda())
    same, renewed, _ = index.gpu_search(queries, 256, [0])
    assert same is gpu
    plan.copy_(renewed)
    graph.replay()
    found = gpu.ids.clone()
    assert torch.equal(found, index.search(queries, Budget(256, 0.1), [0]).ids)
    assert int(found.max()) >= 6_400


METHODS = {
    f"{name}-{mode}": made(mode)
    for mode in MODES
    for name, made in {
        "prkv": lambda mode: kvrecall.PRKV(
            top_k=20,
            gqa=mode,
            page_tokens=4,
            window_tokens=8,
            refresh_interval=6,
            refresh_lead_tokens=2,
            static_ratio=0.6,
            **ZONES,
        ),
        "louiskv": lambda mode: kvrecall.LouisKV(
            top_k=20, gqa=mode, dense_layers=(), cluster_tokens=4, stretch_tokens=32, max_segment_tokens=8, **ZONES
        ),
    }.items()
}


@pytest.mark.parametrize("name", METHODS)
def test_methods_find_and_compute_what_the_cpu_does(name: str) -> None:
    states = [LayerState(0, LayerShape(2, 6, 2, 64, torch.float32, torch.device(d)), METHODS[name]) for d in ("cpu", "cuda")]
    prompt = [normal(2, h, 150, 64, seed=i) for i, h in enumerate((6, 2, 2))]
    for state in states:
        prefill_layer(state, *(x.to(state.shape.device) for x in prompt), None, params())
    for step in range(20):
        new = [normal(2, h, 1, 64, seed=100 + 3 * step + i) for i, h in enumerate((6, 2, 2))]
        outs = [decode_step(state, *(x.to(state.shape.device) for x in new), None, params()) for state in states]
        torch.testing.assert_close(outs[1].cpu(), outs[0], atol=2e-3, rtol=2e-3)
        for b in range(2):
            assert (b in states[0].held) == (b in states[1].held)
            if b in states[0].held:
                expected, found = (state.held[b][0].cpu() for state in states)
                assert torch.equal(found, expected), (step, b)


@pytest.mark.parametrize("mode", ["max_softmax", "mean_softmax", "max"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_query_centroids_rerank_on_either_side(mode: str, dtype: str) -> None:
    """Keys are read from page-locked memory by the GPU, or scored by the CPU; the GPU's search waits for nothing."""
    heads, dim, tokens, kind = 2, 128, 6_000, DTYPES[dtype]
    keys, queries = gaussian(1, heads, tokens, dim).to(kind), gaussian(2, 8, 300, dim).to(kind).cuda()
    found = {}
    for place in ("host", "device"):
        config = CentroidConfig(gqa=mode, rerank=place, list_tokens=400, pool_tokens=64, max_centroids=256)
        index = config.build(LayerShape(1, 8, heads, dim, kind, torch.device("cuda")))
        pool = store(1, heads, dim, kind, "cuda", block_size=1024).host[0]
        index.bind([pool])
        for piece in keys.split(2_500, 1):
            pool.append(torch.stack([piece, piece], 2))
        index.append(0, keys.cuda())
        logits = queries.float().unflatten(0, (heads, 4)) @ keys.cuda().float().unsqueeze(1).transpose(2, 3) * dim**-0.5
        index.end_of_prompt(0, ObservedQueries(queries, logits.logsumexp(-1).flatten(0, 1), tokens - 300), 0)
        index.exclude(0, torch.arange(0, 600, 3, device="cuda", dtype=torch.int32).expand(heads, -1))
        more = [gaussian(30 + i, 1, 8, dim).to(kind).cuda() for i in range(4)]
        index.search(more[0], Budget(200, dim**-0.5), [0])
        index.after_attention([0])
        found[place] = []
        for query in more[1:]:
            if place == "device":
                with no_waiting():
                    made = index.search(query, Budget(200, dim**-0.5), [0])
                    index.after_attention([0])
            else:
                made = index.search(query, Budget(200, dim**-0.5), [0])
                index.after_attention([0])
            assert (made.ids[0] >= 0).all() and not (made.ids[0] < 600).logical_and(made.ids[0] % 3 == 0).any()
            found[place].append(made.ids[0].cpu())
    for one, other in zip(found["host"], found["device"], strict=True):
        for a, b in zip(one.tolist(), other.tolist(), strict=True):
            assert len(set(a) & set(b)) >= 194  # scores that differ by rounding change places at the edge

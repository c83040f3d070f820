"""Indexes so large that many programs search them at once, or that 32 bits are too few for an offset."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import kvrecall
from kvrecall.cache.blocks import stacked
from kvrecall.core.structs import AttentionParams, Budget
from kvrecall.index.base import LayerShape
from kvrecall.index.sphere import SphereConfig, SphereIndex
from kvrecall.layer.pipeline import prefill_layer
from kvrecall.layer.state import LayerState
from tests.index.sphere.with_statistics import usual
from tests.one_layer import ZONES, dense

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
SEARCHES: dict[str, dict[str, Any]] = {
    "collisions": {"gqa": "mean_q"},
    "products": {"gqa": "max", "stage1": "product"},
    "balanced": {
        "gqa": "mean_softmax", "stage1": "product", "center": True, "balance": True, "norms": True, "weight_dtype": "uint8",
    },
}  # fmt: skip


def layer_shape(dim: int) -> LayerShape:
    return LayerShape(1, 32, 8, dim, torch.bfloat16, CUDA, usual(8, 4, dim, turned=False))


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, device=CUDA, generator=torch.Generator(CUDA).manual_seed(seed)).bfloat16()


@pytest.mark.parametrize("name", SEARCHES)
def test_a_search_finds_the_same_ids_every_time(name: str) -> None:
    """Launched and replayed, beside other work that lets programs come in another order; every key is there four times."""
    index, tokens = SphereIndex(layer_shape(128), SphereConfig(**SEARCHES[name])), 50_000
    queries, budget = normal(2, 1, 32, 128), Budget(512, 0.1)
    for _ in range(4):
        index.append(0, normal(1, 8, tokens, 128))
    expected = index.search(queries, budget, [0]).ids
    for ids in expected[0].tolist():
        assert ids == sorted(set(ids)) and ids[0] >= 0
        assert {i - tokens for i in ids if i >= tokens} <= set(ids)  # of equal keys the first ones
    gpu, planned = index._gpu, index._planned
    assert gpu is not None and planned is not None
    graph = torch.cuda.CUDAGraph()
    tables = index.tables(stacked(index._tables, CUDA))
    with torch.cuda.graph(graph):
        gpu.launch(queries, tables, *planned[1:], budget.scaling)
    aside, other = torch.cuda.Stream(), normal(3, 4096, 4096)
    for _ in range(10):
        with torch.cuda.stream(aside):
            other @ other
        gpu.ids.fill_(-2)
        graph.replay()
        assert torch.equal(gpu.ids, expected)
        assert torch.equal(index.search(queries, budget, [0]).ids, expected)
    for among in (1, 8, 1024):  # divided as in a smaller or larger batch
        gpu.ids.fill_(-2)
        gpu.launch(queries, tables, *planned[1:], budget.scaling, among=among)
        assert torch.equal(gpu.ids, expected)


@pytest.mark.parametrize(("name", "dim", "room"), [("balanced", 128, 26_000_000), ("collisions", 80, 31_000_000)])
def test_summaries_beyond_two_to_the_31(name: str, dim: int, room: int) -> None:
    """With so much room, 2^31 bytes of signs, and words or bytes of magnitudes, lie before those of the last head."""
    if torch.cuda.get_device_properties(CUDA).total_memory < 20 << 30:
        pytest.skip("needs 20 GiB of device memory")
    keys, queries = normal(1, 8, 3000, dim), normal(2, 1, 32, dim)
    keys[:, 5] = 0
    keys[:, -1] = 5 * queries.view(8, 4, dim).mean(1)  # the best one
    found = []
    for tokens in (3000, room):
        index = SphereIndex(layer_shape(dim), SphereConfig(**SEARCHES[name]))
        index.reserve(tokens)
        index.append(0, keys)
        ids = index.search(queries, Budget(64, dim**-0.5), [0]).ids
        found.append([ids, *(part.clone() for part in index.codes(0).parts)])
    assert all(torch.equal(far, near) for far, near in zip(*found, strict=True))
    assert (found[1][0][0, :, -1] == 2999).all()


def test_rows_beyond_two_to_the_31_in_a_captured_step() -> None:
    """Of the pool's tokens only the last 24 have keys that are not zero: they are found, and behind them a token is stored."""
    from tests.interpreted.slots import in_slots

    tokens, params = 1_100_000, AttentionParams(128**-0.5)
    state = LayerState(0, layer_shape(128), kvrecall.ParisKV(top_k=24, **ZONES))
    queries, keys, values = (normal(seed, 1, heads, 21, 128) for seed, heads in enumerate((32, 8, 8)))
    prefill_layer(state, queries[:, :, :20], keys[:, :, :20], values[:, :, :20], None, params)  # sink and local
    index, pool, last = state.index, state.store.host[0], normal(3, 8, 24, 2, 128)
    assert isinstance(index, SphereIndex)
    pool.reserve(tokens + 64)
    pool.make_room(1)
    pool.extend(tokens)
    pool.write(tokens - 24, last.cpu())
    index.reserve(tokens + 64)
    index.pages.tensor[: index.pages.committed].zero_()
    index.zero_norms.fill_(1)
    index.extend(0, tokens - 24)
    index.append(0, last[:, :, 0])
    layers, _ = in_slots([state], 64)
    layers.prepare()
    now = torch.ones(1, dtype=torch.int64, device=CUDA)
    out = layers.all[0].step(queries[:, :, 20:], keys[:, :, 20:], values[:, :, 20:], now, params)
    every = torch.cat([torch.stack([keys[0], values[0]], 2), last], 1)
    expected = dense(queries[0, :, 20], every[:, :, 0], every[:, :, 1])
    torch.testing.assert_close(out[0, :, 0].float(), expected, atol=2**-7, rtol=2**-7)
    torch.cuda.synchronize()
    pool.extend(tokens + 1)
    stored = pool.gather(torch.full((8, 1), tokens))
    assert torch.equal(stored[:, 0], every[:, 4].cpu())  # the first behind the sink leaves the window

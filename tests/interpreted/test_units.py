"""The kernels of unit searches find what the compiled CPU path finds: pages, clusters, segments, ragged batches, cuts, ties."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvrecall.core.structs import Budget
from kvrecall.index.base import LayerShape
from kvrecall.index.units import UnitIndex
from kvrecall.index.units.clusters import ClusterConfig
from kvrecall.index.units.pages import PageConfig
from tests.blocks import store
from tests.strategies import HEAD_DIMS, gaussian, poisoned, whole_numbers

pytest.importorskip("triton", reason="Triton is only there on Linux")
from kvrecall.index.units import search as kernels

MODES = ("mean_softmax", "max", "max_softmax", "mean_q")


@pytest.fixture(autouse=True)
def small_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter walks through a reduction element by element."""
    monkeypatch.setattr(kernels, "_LEAST_CHUNK", 16)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most five chunks, of 16 units or more; of what they keep, 16 units are read at once."""
    for name, units in (("_CHUNKS", 5), ("_CANDIDATES", 16)):
        monkeypatch.setattr(kernels, name, units)


def index_of(config: PageConfig | ClusterConfig, keys: list[Tensor], group: int, segments: tuple[int, ...] = ()) -> UnitIndex:
    """An index of one sequence per tensor of keys `[H_kv, n, D]`; the last sum(segments) tokens were generated."""
    heads, _, dim = keys[0].shape
    index = config.build(LayerShape(len(keys), group * heads, heads, dim, keys[0].dtype, torch.device("cpu")))
    index.bind(store(len(keys), heads, dim, keys[0].dtype).host)
    for b, one in enumerate(keys):
        index._sources[b].append(torch.stack([one, one], 2))
        prompt = one.shape[1] - sum(segments)
        index.append(b, one[:, :prompt])
        for length in segments:
            index.append_generated(b, one[:, prompt : prompt + length])
            prompt += length
    return index


def search_both(index: UnitIndex, queries: Tensor, top_k: int, sequences: list[int] | None = None) -> None:
    """Same ids, counts and shape with and without kernels."""
    every = list(range(len(index.lengths))) if sequences is None else sequences
    budget = Budget(top_k, queries.shape[-1] ** -0.5)
    index._kernels = False
    expected = index.search(queries[every], budget, every)
    index._kernels = True
    found = index.search(queries[every], budget, every)
    assert torch.equal(found.counts, expected.counts)
    assert torch.equal(found.ids, expected.ids)


@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
def test_pages_of_all_head_dims(dim: int, dtype: torch.dtype) -> None:
    mode, bounds = MODES[HEAD_DIMS.index(dim) % 4], ("min-max", "mean-deviation")[HEAD_DIMS.index(dim) % 2]
    group = (2, 4, 3, 7, 1, 2, 5)[HEAD_DIMS.index(dim)]
    keys = [gaussian(1, 2, 123, dim).to(dtype), gaussian(2, 2, 61, dim).to(dtype)]
    index = index_of(PageConfig(page_tokens=8, bounds=bounds, gqa=mode), keys, group)
    queries = gaussian(3, 2, 2 * group, dim).to(dtype)
    search_both(index, queries, 43)
    if dtype == torch.float32:
        index.exclude(0, torch.arange(20, 110, 3, dtype=torch.int32).expand(2, -1))  # static tokens: pages with holes
        search_both(index, queries, 21)
        search_both(index, queries, 30, [1])  # one sequence alone, another budget


@pytest.mark.parametrize("mode", MODES)
def test_landmarks(mode: str) -> None:
    """Pages without extent."""
    index = index_of(PageConfig(page_tokens=4, bounds="mean", gqa=mode), [gaussian(1, 2, 75, 64), gaussian(2, 2, 21, 64)], 2)
    for top_k in (30, 7):
        search_both(index, gaussian(3, 2, 4, 64), top_k)
    index.exclude(0, torch.arange(20, 60, 3, dtype=torch.int32).expand(2, -1))
    search_both(index, gaussian(3, 2, 4, 64), 21)


@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_clusters_and_segments_of_all_head_dims(dim: int) -> None:
    mode, group = MODES[HEAD_DIMS.index(dim) % 4], (2, 4, 3, 7, 1, 2, 5)[HEAD_DIMS.index(dim)]
    keys = [gaussian(1, 2, 90, dim), gaussian(2, 2, 50, dim)]
    config = ClusterConfig(cluster_tokens=5, stretch_tokens=40, gqa=mode, size_correction=dim == 80)
    index = index_of(config, keys, group, segments=(7, 1, 12))
    queries = gaussian(3, 2, 2 * group, dim)
    search_both(index, queries, 43)
    index.exclude(1, torch.arange(5, 25, dtype=torch.int32).expand(2, -1))  # some clusters become empty
    search_both(index, queries, 17)


def test_a_budget_of_everything_and_one_of_one_token() -> None:
    keys = [gaussian(1, 2, 75, 64), gaussian(2, 2, 21, 64)]
    for config in (PageConfig(page_tokens=8), ClusterConfig(cluster_tokens=6, stretch_tokens=32)):
        index = index_of(config, keys, 2)
        for top_k in (200, 21, 1):
            search_both(index, gaussian(3, 2, 4, 64), top_k)


def test_equal_units_go_to_the_lower_one_and_the_last_is_cut() -> None:
    keys = whole_numbers(5, 2, 4, 64).repeat(1, 15, 1)  # every page is one of a few, again and again
    index = index_of(PageConfig(page_tokens=4, bounds="min-max", gqa="max"), [keys], 2)
    for top_k in (37, 8, 2):
        search_both(index, whole_numbers(6, 1, 4, 64), top_k)
        ids = index.search(whole_numbers(6, 1, 4, 64), Budget(top_k, 0.125), [0]).ids
        assert ids[0].tolist() == [list(range(top_k))] * 2


def test_equal_units_beside_units_that_are_better_by_one_bit() -> None:
    """Parts of a range of few values reach beyond its end."""
    bits = [
        0, 12, 0, 4, 1, 6, 8, 7, 4, 4, 5, 14, 11, 13, 13, 11, 9, 17, 14, 2, 8, 11, 5, 8, 11, 5, 2, 6, 4, 3, 1, 15, 11, 0, 0, 17,
    ]  # fmt: skip
    keys, queries = torch.zeros(1, len(bits), 64), torch.zeros(1, 2, 64)
    keys[0, :, 0], queries[..., 0] = 1 + torch.tensor(bits) * 2**-23, 1
    index = index_of(PageConfig(page_tokens=1, bounds="mean", gqa="max"), [keys], 2)
    for top_k in range(1, 12):
        search_both(index, queries, top_k)


@pytest.mark.parametrize(("page", "mode", "top_k"), [(1, "mean_softmax", 11), (1, "max", 30), (2, "max", 7), (2, "mean_q", 26)])
def test_many_units_in_chunks(page: int, mode: str, top_k: int, small_blocks: None) -> None:
    keys = [whole_numbers(1, 1, 8, 64).repeat(1, 12, 1), gaussian(2, 1, 55, 64)]
    index = index_of(PageConfig(page_tokens=page, bounds="min-max", gqa=mode), keys, 2)
    search_both(index, gaussian(3, 2, 2, 64), top_k)


@pytest.mark.parametrize("top_k", [13, 60])
def test_clusters_in_chunks(top_k: int, small_blocks: None) -> None:
    index = index_of(ClusterConfig(cluster_tokens=3, stretch_tokens=100), [gaussian(1, 1, 170, 64)], 2, segments=(9, 2))
    search_both(index, gaussian(3, 1, 2, 64), top_k)


def test_scores_are_read_by_nobody_before_they_are_written() -> None:
    """Scratch full of NaN finds the same, also after a longer zone has been searched with it."""
    keys = [gaussian(1, 2, 150, 64)]
    index = index_of(PageConfig(page_tokens=4), keys, 2)
    queries = gaussian(3, 1, 4, 64)
    search_both(index, queries, 30)
    gpu = index._gpu
    assert gpu is not None
    for name in ("scores", "_peak", "_mass"):
        getattr(gpu, name).copy_(poisoned(*getattr(gpu, name).shape))
    search_both(index, queries, 30)
    index.truncate(0, 61)
    search_both(index, queries, 30)
    assert index._gpu is gpu


def test_sequences_that_do_not_fire_keep_their_result() -> None:
    index = index_of(PageConfig(page_tokens=4), [gaussian(1, 1, 60, 64), gaussian(2, 1, 60, 64)], 2)
    queries = gaussian(3, 2, 2, 64)
    gpu, plan, fire = index.gpu_search(queries, 12, [0, 1])
    gpu.launch(queries, plan, fire, 0.125, 12)
    before = gpu.ids.clone()
    gpu.launch(-queries, plan, torch.tensor([0, 1], dtype=torch.int32), 0.125, 12)
    assert torch.equal(gpu.ids[0], before[0]) and not torch.equal(gpu.ids[1], before[1])


def test_copies_of_an_index_share_no_scratch() -> None:
    index = index_of(PageConfig(page_tokens=4), [gaussian(1, 1, 60, 64)], 2)
    search_both(index, gaussian(3, 1, 2, 64), 12)
    assert index.select([0])._gpu is None and index._gpu is not None

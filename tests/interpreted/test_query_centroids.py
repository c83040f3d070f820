"""CTkvr's kernels: nearest centroids, distinct ids and exact scores are those of the references."""

from __future__ import annotations

import pytest
import torch

from kvrecall.index.query_centroids import cpu, reference
from kvrecall.index.query_centroids.lists import CentroidLists, recall
from tests.blocks import host_table
from tests.strategies import HEAD_DIMS, gaussian, generator, whole_numbers

pytest.importorskip("triton", reason="Triton is only there on Linux")
from kvrecall.index.query_centroids import kernels


def lists_of(centroids: torch.Tensor, kv_heads: int, length: int = 3) -> CentroidLists:
    """Lists that tell which centroid and which KV head they belong to."""
    count, nothing = centroids.shape[1], torch.empty(0)
    ids = torch.arange(kv_heads * count * length, dtype=torch.int32).view(kv_heads, count, length)
    return CentroidLists(centroids, nothing, nothing, ids, nothing)


def same(lists: CentroidLists, query: torch.Tensor, kv_heads: int, count: int) -> None:
    """The kernels recall the same lists as the reference, which has them in order of their numbers."""
    found, expected = (of(lists, query, kv_heads, count) for of in (kernels.recall, recall))
    torch.testing.assert_close(found.unit, expected.unit, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(found.norms, expected.norms)
    order = (
        found.picked[:, :, 0].argsort(1) if found.picked.shape[2] else torch.zeros(found.picked.shape[:2], dtype=torch.int64)
    )
    assert torch.equal(found.picked.gather(1, order.unsqueeze(2).expand_as(found.picked)), expected.picked)


@pytest.mark.parametrize(
    ("dim", "group", "count"), list(zip(HEAD_DIMS, (2, 4, 1, 3, 2, 7, 2), (3, 4, 1, 3, 40, 2, 5), strict=True))
)
def test_recall(dim: int, group: int, count: int) -> None:
    centroids = torch.nn.functional.normalize(gaussian(1, 2 * group, 37, dim), dim=-1)
    for seed in range(3):
        query = gaussian(10 + seed, 2 * group, dim) * (1 + seed * torch.arange(2 * group).unsqueeze(1))
        same(lists_of(centroids, 2), query, 2, count)
        centroids[:, seed] = torch.nn.functional.normalize(gaussian(20 + seed, 2 * group, dim), dim=-1)


@pytest.mark.parametrize(("centroids", "length"), [(1, 1), (64, 1024), (65, 1025), (130, 2060)])
def test_recall_of_several_programs_and_of_long_lists(centroids: int, length: int) -> None:
    made = torch.nn.functional.normalize(gaussian(1, 4, centroids, 64), dim=-1)
    for dtype in (torch.float32, torch.float16):
        same(lists_of(made.to(dtype), 2, length), gaussian(2, 4, 64).to(dtype), 2, 4)


def test_recall_by_the_largest_cosine_of_the_group_not_the_largest_product() -> None:
    """One head's query is long and far from every centroid, the other's is short and near to centroid 2."""
    centroids = torch.eye(8)[None, :4].repeat(2, 1, 1)
    query = torch.stack([100 * torch.tensor([1.0, 0, 0, 0, 9, 9, 0, 0]), torch.tensor([0, 0, 0.01, 0, 0, 0, 0, 0])])
    assert kernels.recall(lists_of(centroids, 1), query, 1, 1).picked.tolist() == [[[6, 7, 8]]]


def test_equal_centroids_go_to_the_lower_one() -> None:
    centroids = whole_numbers(1, 2, 3, 64).repeat(1, 8, 1)
    same(lists_of(centroids, 1), whole_numbers(2, 2, 64), 1, 5)


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_a_query_without_a_direction_recalls_lists_that_exist(value: float) -> None:
    lists = lists_of(torch.nn.functional.normalize(gaussian(1, 2, 9, 64), dim=-1), 1)
    found = kernels.recall(lists, torch.full((2, 64), value), 1, 4).picked
    assert found.shape == (1, 4, 3) and (found >= 0).all() and (found < 27).all()


@pytest.mark.parametrize("first_always", [90, 100, 0])
def test_distinct(first_always: int) -> None:
    ids = torch.randint(-1, 90, (3, 2, 20), generator=generator(1), dtype=torch.int32)
    excluded = torch.tensor([[3, 50, 95]] * 3, dtype=torch.int32)
    for without in (None, excluded):
        found, counts = reference.distinct(ids, 100, first_always, without)
        expected, wanted = cpu.distinct(ids, 100, first_always, without)
        assert torch.equal(counts, wanted)
        assert torch.equal(found[:, : expected.shape[1]], expected) and (found[:, expected.shape[1] :] == -1).all()


@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("block_size", [16, 64])
def test_exact_scores_of_rows_in_several_blocks(dim: int, dtype: torch.dtype, block_size: int) -> None:
    rows = gaussian(1, 2, 70, 2, dim).to(dtype)
    ids = torch.stack([torch.randperm(70, generator=generator(h))[:41].sort().values for h in range(2)]).to(torch.int32)
    ids[1, 20:] = -1
    queries = gaussian(2, 2, 3, dim)
    found = kernels.score_rows(queries, host_table([rows], block_size), ids)
    keys = torch.stack([rows[h, ids[h].clamp_min(0).long(), 0] for h in range(2)]).float()
    expected = (queries @ keys.transpose(1, 2)).masked_fill((ids < 0).unsqueeze(1), float("-inf"))
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-5)

"""CTkvr's kernels: nearest centroids, distinct ids and exact scores are those of the references."""

from __future__ import annotations

import pytest
import torch

from kvrecall.index.query_centroids import reference
from kvrecall.index.query_centroids.lists import CentroidLists, directions, nearest
from tests.blocks import host_table
from tests.strategies import HEAD_DIMS, gaussian, generator, whole_numbers

pytest.importorskip("triton", reason="Triton is only there on Linux")
from kvrecall.index.query_centroids import kernels
from kvrecall.index.unit_kernels import search


def lists_of(queries: torch.Tensor) -> CentroidLists:
    nothing = torch.empty(0)
    return CentroidLists(queries, nothing, nothing, nothing, nothing)


@pytest.mark.parametrize(
    ("dim", "group", "count"), list(zip(HEAD_DIMS, (2, 4, 1, 3, 2, 7, 2), (3, 4, 1, 3, 40, 2, 5), strict=True))
)
def test_nearest(dim: int, group: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "_LEAST_CHUNK", 16)
    centroids = torch.nn.functional.normalize(gaussian(1, 2 * group, 37, dim), dim=-1)
    found = kernels.NearestCentroids(centroids, 2, count)
    for seed in range(3):
        queries = gaussian(10 + seed, 2 * group, dim) * (1 + seed * torch.arange(2 * group).unsqueeze(1))
        unit, _ = directions(queries)
        assert torch.equal(found.find(unit), nearest(lists_of(centroids), unit, 2, count))
        centroids[:, seed] = torch.nn.functional.normalize(gaussian(20 + seed, 2 * group, dim), dim=-1)


def test_equal_centroids_go_to_the_lower_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "_LEAST_CHUNK", 16)
    centroids = whole_numbers(1, 2, 3, 64).repeat(1, 8, 1)
    queries = whole_numbers(2, 2, 64)
    found = kernels.NearestCentroids(centroids, 1, 5).find(queries)
    assert torch.equal(found, nearest(lists_of(centroids), queries, 1, 5))


@pytest.mark.parametrize("first_always", [90, 100, 0])
def test_distinct(first_always: int) -> None:
    ids = torch.randint(-1, 90, (3, 2, 20), generator=generator(1), dtype=torch.int32)
    barred = torch.tensor([[3, 50, 95]] * 3, dtype=torch.int32)
    for without in (None, barred):
        found, counts = kernels.distinct(ids, 100, first_always, without)
        expected, wanted = reference.distinct(ids, 100, first_always, without)
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

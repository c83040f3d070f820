"""Fetching: the selected rows, nothing else, and what moved."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvrecall.cache.zone_rows import ZoneRows
from kvrecall.core.structs import HostTable
from kvrecall.fetch import Direct, Fetched, Moved, Staged, fetch_rows, rows_at
from kvrecall.index.base import stack_selections
from tests.blocks import filled, scattered, zone_of
from tests.strategies import SEEDS, examples, gaussian, generator

CPU = torch.device("cpu")


def pool_of(rows: Tensor) -> ZoneRows:
    """A zone of rows `[H_kv, n, 2, D]`, appended in pieces."""
    zone = zone_of(rows.shape[0], rows.shape[3], rows.dtype)
    scattered(zone, rows.shape[1])
    for piece in rows.split(7, 1):
        zone.append(piece)
    return zone


def some_ids(seed: int, tokens: int, width: int) -> Tensor:
    """Ascending distinct ids int32 `[2, width]`, of another count per head, padded with -1."""
    chosen = [
        sorted(torch.randperm(tokens, generator=generator(seed + h))[: 1 + (seed + h) % width].tolist()) for h in range(2)
    ]
    return torch.tensor([c + [-1] * (width - len(c)) for c in chosen], dtype=torch.int32)


def assert_rows(fetched: Fetched, ids: Tensor, rows: Tensor) -> None:
    assert torch.equal(fetched.ids, ids) and fetched.rows.shape == (*ids.shape, *rows.shape[2:])
    for h in range(2):
        count = int((ids[h] >= 0).sum())
        assert torch.equal(fetched.rows[h, :count], rows[h, ids[h, :count].long()])


@examples(30)
@given(seed=SEEDS, tokens=st.integers(1, 80), width=st.integers(1, 12))
def test_rows_are_those_of_the_ids(seed: int, tokens: int, width: int) -> None:
    rows = gaussian(seed, 2, tokens, 2, 4)
    ids = some_ids(seed, tokens, width)
    fetched, moved = fetch_rows(ids, pool_of(rows), None, Direct(), CPU)
    assert_rows(fetched, ids, rows)
    assert moved == Moved(int((ids >= 0).sum()), 0)


@examples(40)
@given(seed=SEEDS, tokens=st.integers(1, 30), widths=st.lists(st.integers(1, 12), min_size=2, max_size=5))
def test_rows_that_are_selected_again_are_not_read_again(seed: int, tokens: int, widths: list[int]) -> None:
    rows = gaussian(seed, 2, tokens, 2, 4)
    pool = Counting(pool_of(rows))
    before, known = None, [set(), set()]
    for number, width in enumerate(widths):
        ids, pool.read = some_ids(seed + 5 * number, tokens, width), []
        fetched, moved = fetch_rows(ids, pool, before, Direct(reuse=True), CPU)
        assert_rows(fetched, ids, rows)
        wanted = [{i for i in head if i >= 0} for head in ids.tolist()]
        fresh = [(h, i) for h in range(2) for i in sorted(wanted[h] - known[h])]
        assert sorted(pool.read) == fresh
        assert moved == Moved(len(fresh), sum(map(len, wanted)) - len(fresh))
        before, known = fetched, wanted


def test_the_same_selection_needs_no_reading_even_without_reuse() -> None:
    pool = Counting(pool_of(gaussian(1, 2, 9, 2, 4)))
    ids = some_ids(3, 9, 5)
    first, _ = fetch_rows(ids, pool, None, Direct(), CPU)
    pool.read = []
    again, moved = fetch_rows(ids.clone(), pool, first, Staged(), CPU)
    assert again is first and not pool.read and moved == Moved(0, int((ids >= 0).sum()))
    other, moved = fetch_rows(some_ids(4, 9, 5), pool, first, Staged(), CPU)
    assert moved.reused == 0 and len(pool.read) == moved.read == int((other.ids >= 0).sum())


def test_fetched_rows_are_copies() -> None:
    pool = pool_of(torch.ones(2, 5, 2, 4))
    fetched, _ = fetch_rows(torch.tensor([[0, 4], [1, 2]], dtype=torch.int32), pool, None, Direct(), CPU)
    fetched.rows.zero_()
    assert torch.equal(next(pool.blocks()), torch.ones(2, 5, 2, 4))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("count", [0, 1, 30])
def test_rows_of_ids_without_padding(count: int, pinned: bool, device: str) -> None:
    rows = gaussian(3, 2, 100, 64).unflatten(1, (50, 2)).bfloat16()
    pool = filled(rows, torch.device(device if pinned else "cpu"))
    ids = torch.stack([torch.randperm(50, generator=generator(h))[:count] for h in range(2)]).int()
    found = rows_at(ids.to(device), pool, torch.device(device))
    assert found.device.type == device and torch.equal(found.cpu(), pool.gather(ids))


class Counting:
    """A pool that remembers what was read from it."""

    def __init__(self, pool: ZoneRows) -> None:
        self.pool, self.read = pool, []

    def table(self, device: torch.device) -> HostTable | None:
        return self.pool.table(device)

    def take(self, heads: Tensor, ids: Tensor, pin: bool = False) -> Tensor:
        self.read += list(zip(heads.tolist(), ids.tolist(), strict=True))
        return self.pool.take(heads, ids)


def test_stacked_selections_are_padded_to_the_longest() -> None:
    one = torch.tensor([[1, 2, -1]], dtype=torch.int32), torch.tensor([2], dtype=torch.int32)
    two = torch.tensor([[7]], dtype=torch.int32), torch.tensor([1], dtype=torch.int32)
    stacked = stack_selections([one, two])
    assert stacked.ids.tolist() == [[[1, 2, -1]], [[7, -1, -1]]] and stacked.counts.tolist() == [[2], [1]]

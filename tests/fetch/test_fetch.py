"""Fetching: the selected rows, nothing else, and what moved."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from kvrecall.cache.host_pool import HostPool
from kvrecall.fetch import fetch_rows
from kvrecall.index.base import stack_selections
from kvrecall.structs import Selection
from tests.strategies import SEEDS, examples, gaussian

CPU = torch.device("cpu")


@examples(30)
@given(
    seed=SEEDS,
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    width=st.integers(1, 12),
    segment=st.integers(1, 50),
)
def test_rows_are_those_of_the_ids(seed: int, lengths: list[int], width: int, segment: int) -> None:
    pools, everything, ids, counts = [], [], [], []
    for b, n in enumerate(lengths):
        rows = gaussian(seed + b, 2, n, 2, 4)
        pools.append(HostPool(2, 4, torch.float32, segment_tokens=segment))
        for piece in rows.split(7, 1):
            pools[-1].append(piece)
        everything.append(rows)
        chosen = [
            sorted(torch.randperm(n, generator=torch.Generator().manual_seed(seed + h))[: 1 + (seed + h) % width].tolist())
            for h in range(2)
        ]
        counts.append([len(c) for c in chosen])
        ids.append([c + [-1] * (width - len(c)) for c in chosen])
    rows, moved = fetch_rows(
        Selection(torch.tensor(ids, dtype=torch.int32), torch.tensor(counts, dtype=torch.int32)), pools, CPU
    )
    assert moved == 0  # the host is the device here
    assert rows.kv.shape == (len(lengths), 2, width, 2, 4) and rows.lengths.tolist() == counts
    for b in range(len(lengths)):
        for h in range(2):
            real = ids[b][h][: counts[b][h]]
            assert torch.equal(rows.kv[b, h, : len(real)], everything[b][h, real])


def test_fetched_rows_are_copies() -> None:
    pool = HostPool(1, 4, torch.float32)
    pool.append(torch.ones(1, 5, 2, 4))
    rows, _ = fetch_rows(
        Selection(torch.tensor([[[0, 4]]], dtype=torch.int32), torch.tensor([[2]], dtype=torch.int32)), [pool], CPU
    )
    rows.kv.zero_()
    assert torch.equal(next(pool.blocks()), torch.ones(1, 5, 2, 4))


def test_stacked_selections_are_padded_to_the_longest() -> None:
    one = torch.tensor([[1, 2, -1]], dtype=torch.int32), torch.tensor([2], dtype=torch.int32)
    two = torch.tensor([[7]], dtype=torch.int32), torch.tensor([1], dtype=torch.int32)
    stacked = stack_selections([one, two])
    assert stacked.ids.tolist() == [[[1, 2, -1]], [[7, -1, -1]]] and stacked.counts.tolist() == [[2], [1]]

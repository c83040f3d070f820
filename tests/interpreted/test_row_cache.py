"""A decode step at fixed addresses: selected rows come from blocks of host memory, and those that recent steps selected too
from the row cache, however many there are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvrecall.attend.reference import attend_rows
from kvrecall.core.structs import AttentionParams, Rows
from tests.blocks import host_table, overwrite
from tests.strategies import gaussian, generator

pytest.importorskip("triton", reason="Triton is only there on Linux")
from benchmarks.row_cache import RowCache
from kvrecall.attend.step import StepAttention

DIM, TOKENS = 16, 700
PARAMS = AttentionParams(DIM**-0.5)


def attended(queries: Tensor, rows: Tensor, new: Tensor) -> Tensor:
    """Attention of queries `[1, G, 1, D]` to rows `[n, 2, D]` and the step's own `[1, 2, D]`."""
    kv = torch.cat([rows, new])[None, None]
    return attend_rows(queries, Rows(kv, torch.tensor([[kv.shape[2]]], dtype=torch.int32)), PARAMS.scaling).out


@pytest.mark.parametrize(("top_k", "block_size"), [(300, 64), (20, 16)])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_only_new_rows_are_read(top_k: int, block_size: int, share: float) -> None:
    order = torch.randperm(TOKENS, generator=generator(top_k))
    again = int(share * top_k)
    first, second = order[:top_k].sort().values, order[top_k - again : 2 * top_k - again].sort().values
    known = gaussian(1, 1, TOKENS, 2, DIM)
    table = host_table([known], block_size)
    step = StepAttention(table, 2, 0, 4, top_k, 8 * TOKENS, torch.zeros(1))
    zone = torch.tensor([[0, 1, 0, 0, 0, 0]], dtype=torch.int32)  # nothing resident but the new token
    for number, ids in enumerate((first, second)):
        queries, new = gaussian(5 + number, 1, 2, 1, DIM), gaussian(9 + number, 1, 2, DIM)
        out = step.launch(
            queries, new[None, :, :1], new[None, :, 1:], ids.int().view(1, 1, -1), zone, torch.tensor([1 + number]), PARAMS
        )
        torch.testing.assert_close(out, attended(queries, known[0, ids], new), atol=2e-6, rtol=2e-6)
        overwrite(table, 0, ids, 1e4)  # who read them again would see it
    assert step.read.tolist() == [2 * top_k - again]


@pytest.mark.parametrize("kept", [0, 16, 100])
@pytest.mark.parametrize("block_size", [16, 64])
def test_sequences_of_their_own_lengths(block_size: int, kept: int) -> None:
    lengths, heads, top_k = [100, 37, 64], 2, 21
    stored = [gaussian(b, heads, length, 2, DIM) for b, length in enumerate(lengths)]
    step = StepAttention(host_table(stored, block_size), 3 * heads, 0, 4, top_k, kept, torch.zeros(1))
    zone = torch.tensor([[0, 1, 0, 0, 0, 0]] * 3 * heads, dtype=torch.int32)  # nothing resident but the new token
    for number in range(2):
        ids = torch.full((3, heads, top_k), -1, dtype=torch.int32)
        for b, length in enumerate(lengths):
            for h in range(heads):
                own = torch.randperm(length, generator=generator(50 * number + 7 * b + h))[: top_k - 9 * h]
                own[0] = length - 1  # the last row of a ragged end
                ids[b, h, : len(own.unique())] = own.unique()
        queries, new = gaussian(5 + number, 3, 3 * heads, 1, DIM), gaussian(9 + number, 3, heads, 2, DIM)
        keys, values = (new[:, :, i : i + 1].contiguous() for i in range(2))
        out = step.launch(queries, keys, values, ids, zone, torch.tensor([1 + number]), PARAMS)
        for b, rows in enumerate(stored):
            for h in range(heads):
                of, chosen = slice(3 * h, 3 * h + 3), rows[h, ids[b, h][ids[b, h] >= 0].long()]
                expected = attended(queries[b : b + 1, of], chosen, new[b, h : h + 1])
                torch.testing.assert_close(out[b : b + 1, of], expected, atol=2e-6, rtol=2e-6)


def test_few_places_keep_what_was_used_last() -> None:
    """As `benchmarks.row_cache` reckons, but for the order in which rows of one step take places."""
    top_k, tokens, rows = 16, 60, 24
    table = host_table([gaussian(1, 1, tokens, 2, DIM)], 16)
    step, reckoned = StepAttention(table, 2, 0, 4, top_k, rows, torch.zeros(1)), RowCache(rows)
    zone = torch.tensor([[0, 1, 0, 0, 0, 0]], dtype=torch.int32)
    draw, recent, missed = generator(3), torch.arange(12), 0
    for number in range(60):
        recent[torch.randint(12, (1,), generator=draw)] = torch.randint(tokens, (1,), generator=draw)
        ids = torch.cat([recent, torch.randint(tokens, (4,), generator=draw)]).unique()
        missed += len(ids) - reckoned.step(ids.tolist())
        ids = torch.nn.functional.pad(ids, (0, top_k - len(ids)), value=-1).int().view(1, 1, -1)
        new = gaussian(number, 1, 2, DIM)
        step.launch(
            gaussian(5, 1, 2, 1, DIM), new[None, :, :1], new[None, :, 1:], ids, zone, torch.tensor([1 + number]), PARAMS
        )
    read = int(step.read)
    assert abs(read - missed) <= 0.05 * missed and read < 0.5 * 60 * top_k

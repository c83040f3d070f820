"""Attention to all rows, and to the last ones in a ring, against the fp32 reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvrecall.attend import reference
from kvrecall.core.structs import AttentionParams, Rows
from kvrecall.merge import merge, with_sinks
from tests.strategies import HEAD_DIMS, gaussian, poisoned

pytest.importorskip("triton", reason="Triton is only there on Linux")
from kvrecall.attend.whole import WholeAttention

HEADS = 2
SINKS = gaussian(99, 10)


def expected(queries: Tensor, seen: list[Tensor], params: AttentionParams) -> Tensor:
    """Attention of queries `[B, H_q, 1, D]`, each sequence to its own rows `[H_kv, N, 2, D]`."""
    outs = []
    for b, rows in enumerate(seen):
        counts = torch.full((1, HEADS), rows.shape[1], dtype=torch.int32)
        parts = [reference.attend_rows(queries[b : b + 1], Rows(rows.unsqueeze(0), counts), params.scaling, params.softcap)]
        outs.append(merge(with_sinks(parts, params.sink_logits)).out)
    return torch.cat(outs)


def follow(
    capacity: int, first: list[int], steps: int, dim: int, group: int, params: AttentionParams,
    dtype: torch.dtype = torch.float32,
) -> None:  # fmt: skip
    """Steps behind `first` rows per sequence; what was never stored is NaN."""
    history = [gaussian(b, HEADS, count, 2, dim).to(dtype) for b, count in enumerate(first)]
    rows = poisoned(len(first), HEADS, capacity, 2, dim).to(dtype)
    for own, stored in zip(rows, history, strict=True):
        own[:, : stored.shape[1]] = stored
    attention = WholeAttention(rows, HEADS * group)
    attention.counts.copy_(torch.tensor(first))
    near = 1e-5 if dtype == torch.float32 else 2**-9
    for number in range(steps):
        queries = 2 * gaussian(1000 + number, len(first), HEADS * group, 1, dim).to(dtype)
        new = gaussian(2000 + number, len(first), HEADS, 1, 2, dim).to(dtype)
        history = [torch.cat([old, own], 1) for old, own in zip(history, new, strict=True)]
        out = attention.launch(queries, new[:, :, :, 0].contiguous(), new[:, :, :, 1].contiguous(), params)
        wanted = expected(queries, [own[:, -capacity:] for own in history], params)
        torch.testing.assert_close(out, wanted.to(dtype), atol=near, rtol=near)
    assert attention.counts.tolist() == [count + steps for count in first] and not attention.bad.any()
    for own, stored in zip(rows, history, strict=True):
        kept = range(max(0, stored.shape[1] - capacity), stored.shape[1])
        assert torch.equal(own[:, [n % capacity for n in kept]], stored[:, -len(kept) :])


@pytest.mark.parametrize(("dim", "group"), list(zip(HEAD_DIMS, (2, 4, 1, 3, 5, 2, 1), strict=True)))
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_a_ring_that_fills_is_full_and_goes_round(dim: int, group: int, softcap: float) -> None:
    follow(7, [0, 3, 6], 12, dim, group, AttentionParams(dim**-0.5, softcap))


@pytest.mark.parametrize(("dim", "group"), [(64, 2), (80, 5)])
def test_learned_sinks(dim: int, group: int) -> None:
    follow(5, [4, 2], 8, dim, group, AttentionParams(dim**-0.5, sink_logits=SINKS[: HEADS * group]))


@pytest.mark.parametrize(
    ("capacity", "first"), [(1, [0, 0]), (16, [15, 1]), (17, [16, 14]), (200, [199, 60]), (300, [62, 297])]
)
def test_rings_of_one_part_and_of_several(capacity: int, first: list[int]) -> None:
    follow(capacity, first, 4, 64, 2, AttentionParams(0.125))


def test_where_there_is_room_for_all_nothing_gives_way() -> None:
    follow(90, [74, 55], 10, 64, 2, AttentionParams(0.125, 5.0))


def test_sixteen_bits() -> None:
    follow(9, [8, 3], 5, 80, 3, AttentionParams(80**-0.5), torch.float16)


def test_a_row_that_is_not_finite_is_flagged() -> None:
    attention = WholeAttention(torch.zeros(3, HEADS, 4, 2, 64), HEADS)
    new = torch.ones(3, HEADS, 1, 64)
    bad = new.clone()
    bad[1, 1, 0, 5] = float("inf")
    attention.launch(new, new, bad, AttentionParams(0.125))
    assert [flag != 0 for flag in attention.bad.tolist()] == [False, True, False]


def test_short_rings_have_few_parts_and_long_ones_no_more_than_merge() -> None:
    """Rows of 64 numbers are read 64 at once."""
    parts = [WholeAttention(torch.zeros(1, 1, n, 2, 64), 1)._lse.shape[2] for n in (1, 64, 65, 128, 4096, 5000)]
    assert parts == [1, 1, 2, 2, 64, 64]

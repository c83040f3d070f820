"""Attention to whole zones in blocks of the device, at once and in captured steps, against the fp32 reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvrecall.attend import reference
from kvrecall.core.structs import AttentionParams, HostTable
from tests.blocks import host_table
from tests.interpreted.test_whole import HEADS, SINKS, expected
from tests.strategies import HEAD_DIMS, gaussian

pytest.importorskip("triton", reason="Triton is only there on Linux")
from kvrecall.attend import zones
from kvrecall.attend.zones import ZoneAttention, attend_zones

NEAR = {torch.float32: 1e-5, torch.float16: 2**-9}
"""The interpreter multiplies no matrices of bf16."""


def compare(
    counts: list[int], block: int, dim: int, group: int, softcap: float = 0.0, dtype: torch.dtype = torch.float32
) -> None:
    """Zones of so many rows; whatever else the memory holds is NaN."""
    stored = [gaussian(b, HEADS, count, 2, dim).to(dtype) for b, count in enumerate(counts)]
    table, lengths = host_table(stored, block), torch.tensor(counts, dtype=torch.int32)
    queries = 2 * gaussian(50, len(counts), HEADS * group, 1, dim).to(dtype)
    made = attend_zones(queries, table, lengths, max(counts), dim**-0.5, softcap)
    clean = HostTable(table.rows.nan_to_num(), table.blocks)
    wanted = reference.attend_zones(queries, clean, lengths, max(counts), dim**-0.5, softcap)
    near = NEAR[dtype]
    torch.testing.assert_close(made.out, wanted.out, atol=near, rtol=near)
    torch.testing.assert_close(made.lse, wanted.lse, atol=1e-5, rtol=1e-5)
    own = expected(queries, stored, AttentionParams(dim**-0.5, softcap))  # by rows that no table was asked for
    torch.testing.assert_close(wanted.out, own, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("dim", "group"), list(zip(HEAD_DIMS, (2, 4, 1, 3, 5, 2, 1), strict=True)))
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_every_head_size(dim: int, group: int, softcap: float) -> None:
    compare([37, 64, 3], 16, dim, group, softcap)


def test_sixteen_bits() -> None:
    compare([70, 1], 32, 64, 3, dtype=torch.float16)


@pytest.mark.parametrize("block", [16, 64, 256])
@pytest.mark.parametrize("counts", [[1, 0, 200], [257, 256, 255], [64, 63, 65]], ids=str)
def test_ragged_zones_in_blocks_of_every_size(block: int, counts: list[int]) -> None:
    compare(counts, block, 64, 2)


@pytest.mark.parametrize("programs", [1, 4, 12, 4096])
def test_any_number_of_parts(programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts that begin and end within blocks, and parts without rows."""
    monkeypatch.setattr(zones, "_PROGRAMS", programs)
    monkeypatch.setattr(zones, "_ROW_BYTES", 16)  # 16 rows at once
    compare([130, 250, 17], 64, 32, 2)


def follow(
    front: int, room: int, block: int, first: list[int], steps: int, dim: int, group: int, params: AttentionParams,
    dtype: torch.dtype = torch.float32,
) -> None:  # fmt: skip
    """Steps behind `first` tokens per sequence; what was never stored is NaN."""
    history = [gaussian(b, HEADS, count, 2, dim).to(dtype) for b, count in enumerate(first)]
    none = torch.full((HEADS, room, 2, dim), float("nan"), dtype=dtype)
    behind = [torch.cat([rows[:, front:], none], 1)[:, :room] for rows in history]
    table = host_table(behind, block)
    attention = ZoneAttention(table, HEADS * group, front, room)
    attention.active.fill_(1)
    attention.front.fill_(float("nan"))
    for own, rows in zip(attention.front, history, strict=True):
        own[:, : rows.shape[1]] = rows[:, :front]
    attention.counts.copy_(torch.tensor(first))
    near = NEAR[dtype]
    for number in range(steps):
        queries = 2 * gaussian(1000 + number, len(first), HEADS * group, 1, dim).to(dtype)
        new = gaussian(2000 + number, len(first), HEADS, 1, 2, dim).to(dtype)
        history = [torch.cat([old, own], 1) for old, own in zip(history, new, strict=True)]
        out = attention.launch(queries, new[:, :, :, 0].contiguous(), new[:, :, :, 1].contiguous(), params)
        torch.testing.assert_close(out, expected(queries, history, params).to(dtype), atol=near, rtol=near)
    assert attention.counts.tolist() == [count + steps for count in first] and not attention.bad.any()
    for b, rows in enumerate(history):
        assert torch.equal(attention.front[b][:, : rows.shape[1]], rows[:, :front])
        assert torch.equal(_zone(table, b, rows.shape[1] - front), rows[:, front:])


def _zone(table: HostTable, sequence: int, count: int) -> Tensor:
    rows = table.rows[table.blocks[sequence].long()].transpose(0, 1).flatten(1, 2)
    return rows[:, : max(0, count)]


@pytest.mark.parametrize(("dim", "group"), list(zip(HEAD_DIMS, (2, 4, 1, 3, 5, 2, 1), strict=True)))
def test_steps_that_fill_the_front_and_then_blocks(dim: int, group: int) -> None:
    follow(4, 32, 16, [0, 3, 19], 4, dim, group, AttentionParams(dim**-0.5, 5.0 if group > 2 else 0.0))


@pytest.mark.parametrize(("front", "first"), [(0, [0, 15]), (1, [17, 1]), (70, [69, 100]), (5, [37, 4])])
def test_new_tokens_begin_blocks_of_their_own(front: int, first: list[int]) -> None:
    follow(front, 64, 16, first, 3, 64, 2, AttentionParams(0.125))


@pytest.mark.parametrize(("dim", "group"), [(64, 2), (80, 5)])
def test_learned_sinks(dim: int, group: int) -> None:
    follow(5, 32, 16, [4, 20], 3, dim, group, AttentionParams(dim**-0.5, sink_logits=SINKS[: HEADS * group]))


def test_steps_in_sixteen_bits() -> None:
    follow(3, 32, 16, [8, 2], 3, 80, 3, AttentionParams(80**-0.5), torch.float16)


def test_a_row_that_is_not_finite_is_flagged() -> None:
    blocks = torch.arange(3, dtype=torch.int32).unsqueeze(1)
    attention = ZoneAttention(HostTable(torch.zeros(3, HEADS, 16, 2, 64), blocks), HEADS, 2, 16)
    new = torch.ones(3, HEADS, 1, 64)
    bad = new.clone()
    bad[1, 1, 0, 5] = float("inf")
    attention.launch(new, new, bad, AttentionParams(0.125))
    assert [flag != 0 for flag in attention.bad.tolist()] == [False, True, False]


@pytest.mark.parametrize("front", [0, 2])
def test_a_place_without_a_sequence_stores_nothing(front: int) -> None:
    """Its table names a block that is somebody's."""
    rows = torch.zeros(2, HEADS, 16, 2, 64)
    attention = ZoneAttention(HostTable(rows, torch.zeros(2, 1, dtype=torch.int32)), HEADS, front, 16)
    new, params = torch.ones(2, HEADS, 1, 64), AttentionParams(0.125)
    for _ in range(4):
        assert torch.equal(attention.launch(new, new, new, params), new)
    assert not rows.any() and not attention.front.any() and not attention.counts.any()


def test_long_zones_have_no_more_parts_than_one_program_merges() -> None:
    """With the part of all other rows; rows of 64 numbers of 4 bytes are read 32 at once."""
    table = HostTable(torch.zeros(1, 1, 64, 2, 64), torch.zeros(1, 1, dtype=torch.int32))
    parts = [ZoneAttention(table, 1, 4, n)._lse.shape[2] for n in (1, 32, 33, 1504, 100_000)]
    assert parts == [2, 2, 3, 48, 48]

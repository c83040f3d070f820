"""Rows in eight bits by kernels: written bit for bit as the reference writes them, and read back wherever they are read."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvrecall.attend import reference
from kvrecall.cache import host_keys
from kvrecall.cache.host_keys import copy_keys
from kvrecall.core import fp8
from kvrecall.core.fp8 import as_stored
from kvrecall.core.launch import next_power_of_2
from kvrecall.core.structs import HostRows, HostTable, Rows
from tests.blocks import host_table, in_eight_bits
from tests.strategies import gaussian, generator

pytest.importorskip("triton", reason="Triton is only there on Linux")
import triton
import triton.language as tl

from kvrecall.attend.cuda import attend_rows
from kvrecall.core.triton import as_stored as stored_again
from kvrecall.core.triton import store_row
from kvrecall.fetch.kernels import gather_rows
from kvrecall.index.query_centroids import kernels

HEADS = 2


@triton.jit
def store_kernel(p_rows, p_pool, p_table, HEADS, TOKENS, BLOCK: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    """Program (token, KV head): stores a row of `[HEADS, TOKENS, 2, D]`."""
    i_t, i_h, o_d = tl.program_id(0), tl.program_id(1), tl.arange(0, BD)
    p_row = p_rows + (i_h * TOKENS + i_t) * (2 * D) + o_d
    b_k, b_v = tl.load(p_row, mask=o_d < D, other=0.0), tl.load(p_row + D, mask=o_d < D, other=0.0)
    store_row(p_pool, p_table, i_t, i_t >= 0, i_h, HEADS, b_k, b_v, BLOCK, D, BD)


@triton.jit
def stored_kernel(p_rows, p_pool, p_out, N, D: tl.constexpr, BD: tl.constexpr, R: tl.constexpr):
    """Keys or values `[N, D]` as they are read back."""
    o_r, o_d = tl.program_id(0) * R + tl.arange(0, R), tl.arange(0, BD)
    o_x, m_x = o_r[:, None] * D + o_d[None, :], (o_r < N)[:, None] & (o_d < D)[None, :]
    tl.store(p_out + o_x, stored_again(tl.load(p_rows + o_x, mask=m_x, other=0.0), p_pool), mask=m_x)


def rows_of(dim: int, dtype: torch.dtype, tokens: int = 40) -> Tensor:
    """Rows of many sizes with numbers far below others of their row, zeros, NaN and infinity, and halfway numbers."""
    rows = gaussian(3, HEADS, tokens, 2, dim) * torch.logspace(-3, 3, tokens).view(-1, 1, 1) * torch.logspace(0, -6, dim)
    rows[0, 3], rows[1, 5, 0, 2], rows[1, 7, 1, 1] = 0.0, float("nan"), float("inf")
    rows[0, 9] = torch.arange(dim) * 0.5 + 1.0  # between two numbers of e4m3
    rows[0, 11, 0] = torch.arange(dim) * 2.0**-11
    rows[0, 11, 0, 0] = 256.0  # the others are its smallest numbers, and halfway between them
    return rows.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("dim", [32, 80, 128])
def test_a_row_is_written_as_the_reference_writes_it(dim: int, dtype: torch.dtype) -> None:
    rows = rows_of(dim, dtype)
    expected = in_eight_bits(host_table([rows], 16))
    held = torch.zeros(len(expected.rows), fp8.block_nbytes((HEADS, 16, 2, dim)), dtype=torch.uint8)
    numbers = fp8.numbers_of(held, (HEADS, 16, 2, dim))
    made = HostTable(numbers, expected.blocks, dtype)
    store_kernel[40, HEADS](rows, made.pool, made.blocks, HEADS, 40, BLOCK=16, D=dim, BD=next_power_of_2(dim))
    for token in range(40):
        at = int(made.blocks[0, token // 16]), slice(None), token % 16
        mine, theirs = (fp8.scales_of(x.rows)[at] for x in (made, expected))
        assert torch.equal(mine.nan_to_num(), theirs.nan_to_num()) and torch.equal(mine.isnan(), theirs.isnan())
        known = ~theirs.isnan()
        assert torch.equal(made.pool[at][known], expected.pool[at][known])


@pytest.mark.parametrize("dim", [80, 128])
def test_what_is_read_back_before_it_is_written(dim: int) -> None:
    rows = rows_of(dim, torch.float32)[0, :, 0].contiguous()
    pool, made = torch.zeros(1, dtype=torch.uint8), torch.zeros_like(rows)
    stored_kernel[(3,)](rows, pool, made, 40, D=dim, BD=next_power_of_2(dim), R=16)
    assert torch.equal(made, as_stored(rows))
    stored_kernel[(3,)](rows, rows, made, 40, D=dim, BD=next_power_of_2(dim), R=16)  # a pool of plain rows
    assert torch.equal(made, rows)


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize(("dim", "dtype"), [(64, torch.float32), (80, torch.float32), (192, torch.float16)])
def test_attention_in_place(dim: int, dtype: torch.dtype, block_size: int) -> None:
    stored = [gaussian(b, HEADS, length, 2, dim).to(dtype) for b, length in enumerate([100, 37])]
    ids = torch.full((2, HEADS, 21), -1, dtype=torch.int32)
    kv, counts = torch.zeros(2, HEADS, 21, 2, dim, dtype=dtype), torch.tensor([[21, 4], [0, 17]], dtype=torch.int32)
    for b, rows in enumerate(stored):
        for h in range(HEADS):
            own = torch.randperm(rows.shape[1], generator=generator(7 * b + h))[: int(counts[b, h])].sort().values
            ids[b, h, : len(own)] = own
            kv[b, h, : len(own)] = as_stored(rows)[h, own]
    queries = gaussian(9, 2, 3 * HEADS, 1, dim).to(dtype)
    made = attend_rows(queries, HostRows(ids, in_eight_bits(host_table(stored, block_size))), dim**-0.5, 3.0)
    expected = reference.attend_rows(queries, Rows(kv, counts), dim**-0.5, 3.0)
    near = 1e-5 if dtype == torch.float32 else 2**-10
    torch.testing.assert_close(made.out, expected.out, atol=near, rtol=near)
    torch.testing.assert_close(made.lse, expected.lse, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("dim", "dtype"), [(64, torch.float32), (80, torch.float16), (128, torch.float32)])
def test_gathered_rows_and_exact_scores(dim: int, dtype: torch.dtype) -> None:
    rows = gaussian(1, HEADS, 70, 2, dim).to(dtype)
    table, back = in_eight_bits(host_table([rows], 16)), as_stored(rows)
    heads, ids = torch.tensor([0, 1, 1, 0]), torch.tensor([69, 0, 17, 16])
    slots, out = torch.tensor([2, 0, 4, 3]), torch.zeros(5, 2, dim, dtype=dtype)
    gather_rows(table, heads, ids, slots, out)
    assert torch.equal(out[slots], back[heads, ids]) and not out[1].any()
    wanted = torch.stack([torch.randperm(70, generator=generator(h))[:41].sort().values for h in range(HEADS)]).int()
    wanted[1, 20:] = -1
    queries = gaussian(2, HEADS, 3, dim)
    found = kernels.score_rows(queries, table, wanted)
    exact = as_stored(rows.float())
    keys = torch.stack([exact[h, wanted[h].clamp_min(0).long(), 0] for h in range(HEADS)])
    expected = (queries @ keys.transpose(1, 2)).masked_fill((wanted < 0).unsqueeze(1), float("-inf"))
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("programs", [1, 6])
@pytest.mark.parametrize(("dim", "dtype"), [(64, torch.float32), (80, torch.float16), (256, torch.float32)])
def test_keys_of_a_part_of_a_zone(dim: int, dtype: torch.dtype, programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_keys, "_PROGRAMS", programs)
    rows, near = gaussian(dim, 3, 200, 2, dim).to(dtype), torch.full((3, 150, dim), float("nan"), dtype=dtype)
    copy_keys(in_eight_bits(host_table([rows], 32)), 30, near[:, 9:140])
    assert torch.equal(near[:, 9:140], as_stored(rows)[:, 30:161, 0])
    assert near[:, :9].isnan().all() and near[:, 140:].isnan().all()

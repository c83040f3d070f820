"""Attention on the CPU to selected rows where they lie: against float64 over the same rows, and in any number of pieces."""

from __future__ import annotations

import numba
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvrecall.attend import attend_selected
from kvrecall.attend.cpu import PIECE
from kvrecall.core.fp8 import quantised
from kvrecall.core.structs import HostTable
from kvrecall.merge import merge
from tests.attend.dense import dense
from tests.blocks import filled
from tests.strategies import DTYPES, HEAD_DIMS, SEEDS, examples, gaussian, generator


def table(rows: Tensor, block_size: int = 16, small: bool = False) -> HostTable:
    """Where rows `[H_kv, n, 2, D]` lie, in blocks that do not ascend. small: in eight bits."""
    found = filled(rows, block_size=block_size, small=small).table(torch.device("cpu"))
    assert found is not None
    return found


def choose(seed: int, tokens: int, counts: list[int]) -> tuple[Tensor, Tensor]:
    """Ascending distinct ids per head, padded with -1."""
    picked = [torch.randperm(tokens, generator=generator(seed + h))[:n].sort().values for h, n in enumerate(counts)]
    ids = torch.full((len(counts), max(counts)), -1, dtype=torch.int32)
    for h, own in enumerate(picked):
        ids[h, : len(own)] = own
    return ids, torch.tensor([len(own) for own in picked], dtype=torch.int32)


def expected(
    queries: Tensor, rows: Tensor, ids: Tensor, counts: Tensor, scaling: float, softcap: float
) -> tuple[Tensor, Tensor]:
    group, outs, lses = queries.shape[0] // rows.shape[0], [], []
    for h in range(rows.shape[0]):
        own = rows[h : h + 1, ids[h, : int(counts[h])].long()]
        out, lse = dense(queries[h * group : (h + 1) * group].unsqueeze(1), own[:, :, 0], own[:, :, 1], scaling, softcap)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs).unsqueeze(0), torch.cat(lses).unsqueeze(0)


@examples(40)
@given(
    seed=SEEDS, dim=st.sampled_from(HEAD_DIMS), dtype=st.sampled_from(sorted(DTYPES)), group=st.sampled_from([1, 3, 8]),
    tokens=st.sampled_from([1, 16, 40, 111, 230]), block_size=st.sampled_from([16, 64, 256]),
    counts=st.lists(st.sampled_from([0, 1, 5, 30, 400]), min_size=1, max_size=3),
    softcap=st.sampled_from([0.0, 5.0]), scale=st.sampled_from([0.1, 1.0, 4.0]), small=st.booleans(),
)  # fmt: skip
def test_against_float64(
    seed: int, dim: int, dtype: str, group: int, tokens: int, block_size: int, counts: list[int], softcap: float, scale: float,
    small: bool,
) -> None:  # fmt: skip
    """docs/design/tolerances.md: 1e-5 absolute and relative, whatever the number of blocks and of pieces."""
    kv_heads = len(counts)
    rows = gaussian(seed, kv_heads, tokens, 2, dim).to(DTYPES[dtype])
    queries = (scale * gaussian(seed + 1, kv_heads * group, dim)).to(DTYPES[dtype])
    ids, real = choose(seed, tokens, [min(tokens, n) for n in counts])
    found = attend_selected(queries, table(rows, block_size, small), ids, real, dim**-0.5, softcap)
    rows = quantised(rows.float()).dequantise() if small else rows  # fp32 products of scales and numbers
    out, lse = expected(queries, rows, ids, real, dim**-0.5, softcap)
    assert found.out.shape == (1, kv_heads * group, 1, dim) and found.lse.shape == (1, kv_heads * group, 1)
    assert found.out.dtype == found.lse.dtype == torch.float32
    torch.testing.assert_close(found.out.double(), out, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.lse.double(), lse, atol=1e-5, rtol=1e-5)


COUNTS = [3 * PIECE + 7, PIECE, 0, 1, PIECE + 1]
"""Several pieces, whole ones, none, one row, and one row in a second piece."""


@pytest.mark.parametrize("dtype", DTYPES)
def test_many_pieces_are_one_attention(dtype: str) -> None:
    """All rows at once give what single pieces give that the general merge puts together."""
    rows, queries = gaussian(0, 5, 300, 2, 64).to(DTYPES[dtype]), gaussian(1, 15, 64)
    ids, counts = choose(2, 300, COUNTS)
    whole, parts = attend_selected(queries, table(rows), ids, counts, 0.125), []
    for first in range(0, max(COUNTS), PIECE):
        own = (counts - first).clamp(0, PIECE)
        parts.append(attend_selected(queries, table(rows), ids[:, first : first + PIECE], own, 0.125))
    joined = merge(parts)
    torch.testing.assert_close(whole.out, joined.out, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(whole.lse, joined.lse, atol=1e-6, rtol=1e-6)
    assert (whole.lse[0, 6:9] == float("-inf")).all() and not whole.out[0, 6:9].any()


def test_threads_do_not_change_a_bit() -> None:
    rows, queries = gaussian(0, 5, 300, 2, 64), gaussian(1, 15, 64)
    ids, counts = choose(2, 300, COUNTS)
    alone = attend_selected(queries, table(rows), ids, counts, 0.125)
    before = numba.get_num_threads()
    try:
        numba.set_num_threads(1)
        one = attend_selected(queries, table(rows), ids, counts, 0.125)
    finally:
        numba.set_num_threads(before)
    assert torch.equal(alone.out, one.out) and torch.equal(alone.lse, one.lse)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [0, 4])
def test_an_empty_selection_is_minus_infinity_and_zero(dtype: str, width: int) -> None:
    rows = gaussian(0, 2, 9, 2, 64).to(DTYPES[dtype])
    ids, counts = torch.full((2, width), -1, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    part = attend_selected(gaussian(1, 6, 64).to(DTYPES[dtype]), table(rows), ids, counts, 0.125)
    assert torch.equal(part.out, torch.zeros(1, 6, 1, 64)) and (part.lse == float("-inf")).all()


def test_one_empty_head_leaves_the_others_alone() -> None:
    rows, queries = gaussian(0, 3, 20, 2, 64), gaussian(1, 9, 64)
    ids, counts = choose(2, 20, [6, 0, 2])
    found = attend_selected(queries, table(rows), ids, counts, 0.125)
    out, _ = expected(queries, rows, ids, counts, 0.125, 0.0)
    torch.testing.assert_close(found.out.double(), out, atol=1e-5, rtol=1e-5)
    assert (found.lse[0, 3:6] == float("-inf")).all() and torch.isfinite(found.lse[0, [0, 1, 2, 6, 7, 8]]).all()


def test_large_logits_do_not_overflow() -> None:
    rows, queries = gaussian(0, 1, 63, 2, 64), gaussian(1, 2, 64)
    rows[:, :, 0] *= 1e18
    ids, counts = choose(0, 63, [63])
    found = attend_selected(queries, table(rows), ids, counts, 1.0)
    winner = (queries @ rows[0, :, 0].T).argmax(-1)
    torch.testing.assert_close(found.out[0, :, 0], rows[0, winner, 1], atol=1e-4, rtol=1e-4)

"""Decode attention over rows: numba and reference against float64, padding never read, error budget of invariant 3."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from kvrecall.attend import attend_rows, cpu, reference
from kvrecall.core.structs import Partial, Rows
from tests.attend.dense import dense
from tests.strategies import DTYPES, HEAD_DIMS, SEEDS, examples, gaussian, poisoned

PATHS: dict[str, Callable[..., Partial]] = {"numba": cpu.attend_rows, "reference": reference.attend_rows}
paths = pytest.mark.parametrize("attend", PATHS.values(), ids=PATHS)


def ragged_rows(seed: int, lengths: list[list[int]], dim: int, dtype: torch.dtype, spare: int = 3) -> Rows:
    """Rows `[B, H_kv, longest + spare, 2, D]`, NaN behind each length."""
    counts = torch.tensor(lengths, dtype=torch.int32)
    longest = int(counts.max()) + spare
    kv = gaussian(seed, *counts.shape, longest, 2, dim).to(dtype)
    behind = torch.arange(longest) >= counts.unsqueeze(-1)
    return Rows(kv.masked_fill(behind[..., None, None], float("nan")), counts)


def expected(queries: torch.Tensor, rows: Rows, scaling: float, softcap: float) -> tuple[torch.Tensor, torch.Tensor]:
    group = queries.shape[1] // rows.kv.shape[1]
    outs, lses = [], []
    for b, row in enumerate(rows.lengths.tolist()):
        parts = [
            dense(
                queries[b, h * group : (h + 1) * group],
                rows.kv[b, h : h + 1, :n, 0],
                rows.kv[b, h : h + 1, :n, 1],
                scaling,
                softcap,
            )
            for h, n in enumerate(row)
        ]
        outs.append(torch.cat([p[0] for p in parts]))
        lses.append(torch.cat([p[1] for p in parts]))
    return torch.stack(outs), torch.stack(lses)


@paths
@examples(30)
@given(
    seed=SEEDS, dim=st.sampled_from(HEAD_DIMS), dtype=st.sampled_from(sorted(DTYPES)), group=st.integers(1, 5),
    lengths=st.lists(st.lists(st.sampled_from([0, 1, 7, 63, 111]), min_size=2, max_size=2), min_size=1, max_size=3),
    softcap=st.sampled_from([0.0, 5.0]), scale=st.sampled_from([0.1, 1.0, 4.0]),
)  # fmt: skip
def test_against_float64(
    attend, seed: int, dim: int, dtype: str, group: int, lengths: list[list[int]], softcap: float, scale: float
) -> None:
    """docs/design/tolerances.md: 1e-5 absolute and relative; NaN behind the lengths must not show."""
    rows = ragged_rows(seed, lengths, dim, DTYPES[dtype])
    queries = (scale * gaussian(seed + 1, len(lengths), 2 * group, 1, dim)).to(DTYPES[dtype])
    part = attend(queries, rows, dim**-0.5, softcap)
    out, lse = expected(queries, rows, dim**-0.5, softcap)
    assert part.out.dtype == part.lse.dtype == torch.float32
    torch.testing.assert_close(part.out.double(), out, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(part.lse.double(), lse, atol=1e-5, rtol=1e-5)


@paths
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_empty_part_is_minus_infinity_and_zero(attend, dtype: str) -> None:
    rows = Rows(poisoned(2, 2, 5, 2, 64, dtype=DTYPES[dtype]), torch.tensor([[0, 0], [0, 0]], dtype=torch.int32))
    part = attend(gaussian(0, 2, 4, 1, 64).to(DTYPES[dtype]), rows, 0.125)
    assert torch.equal(part.out, torch.zeros(2, 4, 1, 64)) and (part.lse == float("-inf")).all()
    empty = attend(gaussian(0, 1, 4, 1, 64), Rows(torch.empty(1, 2, 0, 2, 64), torch.zeros(1, 2, dtype=torch.int32)), 0.125)
    assert (empty.lse == float("-inf")).all() and (empty.out == 0).all()


@paths
@pytest.mark.parametrize("size", [1e3, 1e18], ids=["large", "huge"])
def test_large_logits_do_not_overflow(attend, size: float) -> None:
    kv = gaussian(0, 1, 1, 63, 2, 64)
    kv[:, :, :, 0] *= size
    queries = gaussian(1, 1, 2, 1, 64)
    part = attend(queries, Rows(kv, torch.tensor([[63]], dtype=torch.int32)), 1.0)
    winner = (queries[0, :, 0] @ kv[0, 0, :, 0].T).argmax(-1)
    torch.testing.assert_close(part.out[0, :, 0], kv[0, 0, winner, 1], atol=1e-4, rtol=1e-4)
    assert torch.isfinite(part.lse).all()


@paths
def test_strided_lengths_and_queries(attend) -> None:
    """As the pipeline hands them over: lengths expanded over heads, queries transposed."""
    rows = ragged_rows(0, [[9, 9], [4, 4]], 64, torch.float32)
    lengths = torch.tensor([9, 4], dtype=torch.int32).unsqueeze(1).expand(-1, 2)
    queries = gaussian(1, 2, 1, 6, 64).transpose(1, 2)
    part = attend(queries, Rows(rows.kv, lengths), 0.125)
    plain = attend(queries.contiguous(), rows, 0.125)
    assert torch.equal(part.out, plain.out) and torch.equal(part.lse, plain.lse)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("tokens", [63, 1000, 4001])
def test_error_is_at_most_twice_that_of_the_dense_kernel(dtype: str, dim: int, tokens: int) -> None:
    """Invariant 3, output rounded to the model's dtype as the pipeline does; root mean square over heads and numbers."""
    kind, heads, kv_heads = DTYPES[dtype], 8, 2
    keys, values = (gaussian(seed, 1, kv_heads, tokens, dim).to(kind) for seed in (tokens, tokens + 1))
    queries = (2 * gaussian(2, 1, heads, 1, dim)).to(kind)
    exact = dense(queries[0], keys[0], values[0], dim**-0.5)[0]
    kernel = F.scaled_dot_product_attention(queries, keys, values, enable_gqa=True)[0].double()
    rows = Rows(torch.stack([keys, values], 3), torch.full((1, kv_heads), tokens, dtype=torch.int32))
    ours = attend_rows(queries, rows, dim**-0.5).out.to(kind)[0].double()
    budget = 2 * (kernel - exact).square().mean().sqrt()
    assert (ours - exact).square().mean().sqrt() <= budget


def test_several_queries_at_once_use_the_reference() -> None:
    rows, queries = ragged_rows(0, [[20, 7]], 64, torch.float32), gaussian(1, 1, 4, 3, 64)
    part = attend_rows(queries, rows, 0.125)
    for t in range(3):
        one = cpu.attend_rows(queries[:, :, t : t + 1], rows, 0.125)
        torch.testing.assert_close(part.out[:, :, t : t + 1], one.out, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(part.lse[:, :, t : t + 1], one.lse, atol=1e-5, rtol=1e-5)

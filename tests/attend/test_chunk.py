"""Prefill attention: blocks and causal chunks against float64 and torch's own kernel."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from kvrecall.attend import attend_block, attend_causal
from kvrecall.attend import chunk as chunk_module
from kvrecall.merge import merge
from tests.attend.dense import dense
from tests.strategies import DTYPES, HEAD_DIMS, SEEDS, examples, gaussian

TOLERANCE = {"fp32": 1e-5, "bf16": 1.6e-2, "fp16": 2e-3}
"""Two roundings of an output of magnitude up to about 3 in the kernel's dtype; fp32 as in docs/design/tolerances.md."""
counts = st.sampled_from([1, 2, 63, 111, 300])


def inputs(seed: int, heads: int, kv_heads: int, queries: int, rows: int, dim: int, dtype: str) -> tuple[torch.Tensor, ...]:
    kind = DTYPES[dtype]
    return (
        gaussian(seed, heads, queries, dim).to(kind),
        gaussian(seed + 1, kv_heads, rows, 2, dim).to(kind),
    )


@examples(30)
@given(
    seed=SEEDS, dim=st.sampled_from(HEAD_DIMS), dtype=st.sampled_from(sorted(DTYPES)), group=st.integers(1, 4), queries=counts,
    rows=counts, softcap=st.sampled_from([0.0, 5.0]),
)  # fmt: skip
def test_block(seed: int, dim: int, dtype: str, group: int, queries: int, rows: int, softcap: float) -> None:
    q, block = inputs(seed, 2 * group, 2, queries, rows, dim, dtype)
    part = attend_block(q, block, dim**-0.5, softcap)
    out, lse = dense(q, block[:, :, 0], block[:, :, 1], dim**-0.5, softcap)
    assert part.out.shape == (1, 2 * group, queries, dim) and part.out.dtype == part.lse.dtype == torch.float32
    tolerance = TOLERANCE["fp32" if softcap else dtype]
    torch.testing.assert_close(part.out[0].double(), out, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(part.lse[0].double(), lse, atol=max(1e-5, tolerance / 10), rtol=1e-5)


@examples(30)
@given(
    seed=SEEDS, dim=st.sampled_from(HEAD_DIMS), dtype=st.sampled_from(sorted(DTYPES)), group=st.integers(1, 4), count=counts,
    softcap=st.sampled_from([0.0, 5.0]),
)  # fmt: skip
def test_causal(seed: int, dim: int, dtype: str, group: int, count: int, softcap: float) -> None:
    q, block = inputs(seed, 2 * group, 2, count, count, dim, dtype)
    keys, values = block[:, :, 0], block[:, :, 1]
    part = attend_causal(q, keys, values, dim**-0.5, softcap)
    out, lse = dense(q, keys, values, dim**-0.5, softcap, causal=True)
    tolerance = TOLERANCE["fp32" if softcap else dtype]
    torch.testing.assert_close(part.out[0].double(), out, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(part.lse[0].double(), lse, atol=max(1e-5, tolerance / 10), rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_chunk_after_blocks_equals_torch_over_everything(dtype: str, dim: int) -> None:
    """What prefill does with its second chunk: earlier blocks, then itself; error at most twice the kernel's own."""
    q, block = inputs(dim, 6, 2, 111, 363, dim, dtype)
    keys, values = block[:, :, 0], block[:, :, 1]
    parts = [attend_block(q, piece, dim**-0.5) for piece in (block[:, :1], block[:, 1:64], block[:, 64:252])]
    ours = merge([attend_causal(q, keys[:, 252:], values[:, 252:], dim**-0.5), *parts]).out[0].to(DTYPES[dtype]).double()
    mask = torch.arange(363) <= torch.arange(252, 363).unsqueeze(1)
    whole = [x.unsqueeze(0) for x in (q, keys, values)]
    kernel = F.scaled_dot_product_attention(*whole, attn_mask=mask, enable_gqa=True)[0].double()
    exact = dense(q, keys, values, dim**-0.5, causal=True)[0]
    assert (ours - exact).square().mean().sqrt() <= 2 * (kernel - exact).square().mean().sqrt()


def test_empty_block_is_the_identity() -> None:
    part = attend_block(gaussian(0, 4, 7, 64), torch.empty(2, 0, 2, 64), 0.125)
    assert (part.out == 0).all() and (part.lse == float("-inf")).all() and part.out.shape == (1, 4, 7, 64)


@pytest.mark.parametrize("queries", [1, 255, 256, 257, 600])
def test_pieces_of_the_fp32_path_join_up(queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    q, block = inputs(0, 4, 2, queries, queries, 64, "fp32")
    flash = attend_causal(q, block[:, :, 0], block[:, :, 1], 0.125), attend_block(q, block, 0.125)
    monkeypatch.setattr(chunk_module, "_has_flash", lambda queries: False)
    math = attend_causal(q, block[:, :, 0], block[:, :, 1], 0.125), attend_block(q, block, 0.125)
    for a, b in zip(math, flash, strict=True):
        torch.testing.assert_close(a.out, b.out, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(a.lse, b.lse, atol=1e-5, rtol=1e-5)


def test_strided_views_of_a_longer_segment() -> None:
    """Blocks are views into host segments with spare rows; what lies behind them is never read."""
    segment = torch.full((2, 100, 2, 64), float("nan"))
    segment[:, 10:40] = gaussian(0, 2, 30, 2, 64)
    q = gaussian(1, 4, 5, 64)
    part, copy = attend_block(q, segment[:, 10:40], 0.125), attend_block(q, segment[:, 10:40].clone(), 0.125)
    assert torch.equal(part.out, copy.out) and torch.equal(part.lse, copy.lse)

"""A part taken into an attention in place, by a kernel, is the merge of both."""

from __future__ import annotations

import pytest
import torch

from kvrecall.core.structs import Partial
from kvrecall.merge import merge
from kvrecall.merge.kernels import take_in
from tests.strategies import gaussian


def made(seed: int, tokens: int, dim: int, spread: float, rows_first: bool) -> Partial:
    """rows_first: heads side by side within a token, as attention kernels leave them."""
    out = gaussian(seed, 1, tokens, 3, dim).transpose(1, 2) if rows_first else gaussian(seed, 1, 3, tokens, dim)
    return Partial(out, spread * gaussian(seed + 1, 1, 3, tokens))


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize(("tokens", "spread"), [(1, 1.0), (16, 5.0), (37, 100.0)])
@pytest.mark.parametrize("rows_first", [False, True])
def test_is_the_merge_of_both(dim: int, tokens: int, spread: float, rows_first: bool) -> None:
    so_far, part = made(dim, tokens, dim, spread, rows_first), made(dim + 7, tokens, dim, spread, not rows_first)
    expected = merge([Partial(so_far.out.clone(), so_far.lse.clone()), part])
    take_in(so_far, part)
    torch.testing.assert_close(so_far.out, expected.out, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(so_far.lse, expected.lse, atol=1e-5, rtol=1e-6)


def test_empty_parts_change_nothing() -> None:
    so_far, empty = made(1, 20, 64, 1.0, False), Partial.empty_like(torch.empty(1, 3, 20, 64))
    before = so_far.out.clone(), so_far.lse.clone()
    take_in(so_far, empty)
    assert torch.equal(so_far.out, before[0]) and torch.equal(so_far.lse, before[1])
    take_in(empty, so_far)
    assert torch.equal(empty.out, before[0]) and torch.equal(empty.lse, before[1])
    twice = [Partial.empty_like(torch.empty(1, 3, 20, 64)) for _ in range(2)]
    take_in(*twice)
    assert (twice[0].out == 0).all() and (twice[0].lse == float("-inf")).all()

"""Kernels that score a zone's keys for a static set give what torch gives. The interpreter has no products of bf16."""

from __future__ import annotations

import pytest
import torch

from kvrecall.select.queries import ObservedQueries
from kvrecall.static import choice, kernels
from tests.strategies import gaussian


@pytest.mark.parametrize(("dim", "group", "window"), [(64, 4, 64), (80, 1, 5), (96, 3, 64), (128, 7, 20), (256, 2, 64)])
@pytest.mark.parametrize(("tokens", "begin"), [(700, 4), (1, 30), (130, 950), (70, 1010)])
def test_scores_are_those_of_torch(tokens: int, begin: int, dim: int, group: int, window: int) -> None:
    """Strided queries and keys. The last keys come behind the first queries, which do not see them."""
    queries = gaussian(dim, window, 2 * group, dim).half().transpose(0, 1)
    keys = gaussian(tokens, 2, tokens + 9, dim).half()[:, 5 : 5 + tokens]
    observed = ObservedQueries(queries, torch.zeros(2 * group, window), 1000)
    own = gaussian(3, 2, 1090, dim).half()
    total = choice._total([choice._mass(observed, own, 0, dim**-0.5)], observed, [], dim**-0.5)
    expected = choice._mass(observed, keys, begin, dim**-0.5)
    made = kernels.mass(observed, keys, begin, dim**-0.5)
    assert made.shape == (2, group, window) and torch.equal(made.isfinite(), expected.isfinite())
    torch.testing.assert_close(made, expected, atol=1e-4, rtol=1e-5)
    shares = choice.shares(observed, total, keys, begin, dim**-0.5).mean((1, 2))
    scores = torch.full((2, tokens + 3), float("nan"))
    kernels.mean_shares(observed, keys, begin, dim**-0.5, total, scores[:, :tokens])
    torch.testing.assert_close(scores[:, :tokens], shares, atol=1e-7, rtol=1e-4)
    assert scores[:, tokens:].isnan().all()

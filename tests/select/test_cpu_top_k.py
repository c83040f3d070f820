"""The k largest of many numbers, by numba, against a stable sort."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvrecall.select.cpu import top_k_of
from tests.strategies import SEEDS, examples, gaussian


def check(scores: Tensor, k: int) -> None:
    out = np.full(k, -7, np.int32)
    found = top_k_of(scores.numpy(), np.arange(len(scores), dtype=np.int32), k, out)
    best = scores.double().sort(descending=True, stable=True).indices[:k].sort().values
    assert found == len(best) and out[:found].tolist() == best.tolist()


@examples(60)
@given(
    seed=SEEDS, count=st.sampled_from([1, 2, 63, 3000]), k=st.sampled_from([1, 5, 62, 2999]),
    scale=st.sampled_from([1e-30, 1.0, 1e30]), digits=st.sampled_from([0, 1, 6]), offset=st.sampled_from([0.0, -9.0]),
)  # fmt: skip
def test_of_any_size_and_with_ties(seed: int, count: int, k: int, scale: float, digits: int, offset: float) -> None:
    check(((gaussian(seed, count) * 10**digits).round() + offset) / 10**digits * scale, k)


INFINITE = float("inf")


@pytest.mark.parametrize(
    "scores",
    [[1.0] * 9, [0.0, -0.0] * 5, [-INFINITE, 1.0, -INFINITE, 2.0], [INFINITE, 1.0, -INFINITE, INFINITE, 0.5],
     [3e38, -3e38, 1.0, 2.0], [1e-45, 0.0, -1e-45, 2e-45], [-INFINITE] * 4],
    ids=["equal", "zeros", "minus infinity", "both infinities", "far apart", "denormal", "nothing finite"],
)  # fmt: skip
@pytest.mark.parametrize("k", [1, 2, 3])
def test_of_special_numbers(scores: list[float], k: int) -> None:
    check(torch.tensor(scores), k)


@pytest.mark.parametrize("k", [1, 40, 900])
def test_one_number_far_from_all_others(k: int) -> None:
    """Equal ranges of scores leave nearly all of them in one range."""
    scores = gaussian(0, 1000)
    scores[17] = 1e20
    check(scores, k)

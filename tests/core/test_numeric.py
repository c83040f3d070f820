"""Scalar building blocks for numba, against numpy."""

from __future__ import annotations

import numpy as np
import pytest
from numba import njit

from kvrecall.core.numba import exp_below, trailing_zeros


@njit
def _exp(x, out):
    for i in range(x.shape[0]):
        out[i] = exp_below(x[i])


@njit
def _zeros(words, out):
    for i in range(words.shape[0]):
        out[i] = trailing_zeros(words[i])


@pytest.mark.parametrize("largest", [1e-9, 0.4, 30.0, 708.0])
def test_exponentials_are_those_of_a_wider_type(largest: float) -> None:
    x = -np.linspace(0, largest, 100_001)
    out = np.empty_like(x)
    _exp(x, out)
    exact = np.exp(x.astype(np.longdouble))
    assert np.abs(out / exact - 1).max() < 4e-16 and out[0] == 1.0


def test_exponentials_of_small_numbers_stay_above_0() -> None:
    x, out = np.array([-708.0, -709.0, -1e300, -np.inf]), np.empty(4)
    _exp(x, out)
    assert (out == out[0]).all() and 0 < out[0] < 1e-307


def test_zeros_below_the_lowest_one() -> None:
    rng = np.random.default_rng(0)
    places = np.arange(64, dtype=np.uint64)
    words = (rng.integers(0, 2**63, 64).astype(np.uint64) | np.uint64(1)) << places
    out = np.empty(64, np.int64)
    _zeros(words, out)
    assert (out == np.arange(64)).all()

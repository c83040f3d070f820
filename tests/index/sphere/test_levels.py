"""Lloyd-Max levels: published values, optimality, every block size."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrecall.core.errors import ParameterError
from kvrecall.index.sphere.levels import lloyd_max
from tests.strategies import examples

# Converged values for |u_j|, u uniform on the unit sphere in R^m: thresholds, levels, mean squared error.
PUBLISHED = {
    4: (
        [0.1129, 0.2262, 0.3407, 0.4568, 0.5757, 0.6990, 0.8304],
        [0.0564, 0.1694, 0.2831, 0.3982, 0.5154, 0.6360, 0.7620, 0.8987],
        1.228e-3,
    ),
    8: (
        [0.0853, 0.1716, 0.2603, 0.3528, 0.4516, 0.5612, 0.6921],
        [0.0425, 0.1280, 0.2152, 0.3053, 0.4003, 0.5030, 0.6193, 0.7648],
        8.585e-4,
    ),
    16: (
        [0.0624, 0.1259, 0.1917, 0.2616, 0.3382, 0.4264, 0.5391],
        [0.0311, 0.0937, 0.1580, 0.2254, 0.2978, 0.3785, 0.4743, 0.6039],
        5.06e-4,
    ),
}
GRID = 200_001


def density(m: int) -> tuple[np.ndarray, np.ndarray]:
    """Magnitudes x and their probabilities on a grid that is even in arcsin x, where the density is smooth."""
    t = (np.arange(GRID) + 0.5) / GRID * np.pi / 2
    weight = np.cos(t) ** (m - 2)
    return np.sin(t), weight / weight.sum()


def squared_error(m: int, thresholds: np.ndarray, levels: np.ndarray) -> float:
    x, p = density(m)
    return float((p * (x - levels[np.searchsorted(thresholds, x, side="right")]) ** 2).sum())


@pytest.mark.parametrize("m", PUBLISHED)
def test_published_values(m: int) -> None:
    thresholds, levels, error = PUBLISHED[m]
    ours = lloyd_max(m)
    np.testing.assert_allclose(ours[0], thresholds, atol=5.001e-5, rtol=0)
    np.testing.assert_allclose(ours[1], levels, atol=5.001e-5, rtol=0)
    assert squared_error(m, *ours) == pytest.approx(error, rel=1e-3)


@pytest.mark.parametrize("m", [2, 4, 8, 16, 100])
@pytest.mark.parametrize("step", [1e-3, -1e-3], ids=["up", "down"])
def test_moving_any_level_or_threshold_does_not_lower_the_error(m: int, step: float) -> None:
    thresholds, levels = lloyd_max(m)
    best = squared_error(m, thresholds, levels)
    for t in range(8):
        moved = levels.copy()
        moved[t] += step
        assert squared_error(m, thresholds, moved) > best
    for t in range(7):
        moved = thresholds.copy()
        moved[t] += step
        assert squared_error(m, moved, levels) > best


@pytest.mark.parametrize("m", [4, 8])
def test_levels_are_the_means_of_sampled_directions(m: int) -> None:
    """Against the geometry itself, not the density that the code assumes."""
    directions = np.random.default_rng(0).standard_normal((400_000, m))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    magnitude = np.abs(directions).ravel()
    thresholds, levels = lloyd_max(m)
    cell = np.searchsorted(thresholds, magnitude, side="right")
    means = [magnitude[cell == t].mean() for t in range(8)]
    np.testing.assert_allclose(means, levels, atol=1e-3)


def test_three_coordinates_have_even_levels() -> None:
    """Archimedes: one coordinate of a point on the sphere in R^3 is uniform."""
    thresholds, levels = lloyd_max(3)
    np.testing.assert_allclose(thresholds, np.arange(1, 8) / 8, atol=1e-9)
    np.testing.assert_allclose(levels, (np.arange(8) + 0.5) / 8, atol=1e-9)


@examples(20)
@given(m=st.one_of(st.integers(2, 300), st.sampled_from([2, 3, 5, 63, 111, 300])), bits=st.integers(1, 4))
def test_any_block_size_is_a_fixed_point(m: int, bits: int) -> None:
    thresholds, levels = lloyd_max(m, bits)
    assert levels.shape == (2**bits,) and thresholds.shape == (2**bits - 1,)
    edges = np.concatenate([[0.0], thresholds, [1.0]])
    assert np.all(np.diff(edges) > 0)
    assert np.all((edges[:-1] < levels) & (levels < edges[1:]))
    np.testing.assert_allclose(thresholds, (levels[1:] + levels[:-1]) / 2, atol=1e-9)
    x, p = density(m)
    cell = np.searchsorted(thresholds, x, side="right")
    mass = np.bincount(cell, p, minlength=2**bits)
    # The top cells of a fine quantiser hold almost no mass; the grid knows their means to the grid's own resolution.
    means = np.bincount(cell, p * x, minlength=2**bits) / mass
    np.testing.assert_allclose(means, levels, atol=2e-5)


def test_results_are_shared_and_therefore_read_only() -> None:
    thresholds, levels = lloyd_max(8)
    assert lloyd_max(8)[1] is levels
    for array in (thresholds, levels):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0.5


@pytest.mark.parametrize(("arguments", "name"), [((1,), "subspace_dim"), ((0,), "subspace_dim"), ((8, 0), "bits")])
def test_impossible_arguments(arguments: tuple[int, ...], name: str) -> None:
    with pytest.raises(ParameterError, match=f"{name}: expected an integer"):
        lloyd_max(*arguments)

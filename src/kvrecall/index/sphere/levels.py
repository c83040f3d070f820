"""Lloyd-Max levels for the magnitude of one coordinate of a random direction (ParisKV Appendix B.1.2).

A direction drawn uniformly from the unit sphere in R^m has coordinates whose magnitude X has density proportional to
(1 - x^2)^((m - 3) / 2) on [0, 1], i.e. X^2 ~ Beta(1/2, (m - 1)/2) (Eq. 12). The substitution x = sin(t) turns it into
cos(t)^(m - 2), smooth for every m >= 2, with an elementary first moment; Gauss-Legendre quadrature gives its mass. The
quantiser depends on m alone and on no key, so drift cannot make it stale.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from kvrecall.core.errors import ParameterError

MAGNITUDE_BITS = 3


@cache
def lloyd_max(subspace_dim: int, bits: int = MAGNITUDE_BITS) -> tuple[np.ndarray, np.ndarray]:
    """Optimal scalar quantiser of one coordinate's magnitude.

    subspace_dim: m >= 2. bits: 2^bits levels.
    Returns (thresholds float64 `[2^bits - 1]`, levels float64 `[2^bits]`), both ascending, read-only: level t stands for
    magnitudes in [thresholds[t - 1], thresholds[t]).
    Raises ParameterError for m < 2 or bits < 1.
    """
    if subspace_dim < 2:
        raise ParameterError("subspace_dim", "an integer >= 2", subspace_dim, "A direction needs at least two coordinates.")
    if bits < 1:
        raise ParameterError("bits", "an integer >= 1", bits, "Use 3, as the paper does.")
    count = 2**bits
    # Start from equal steps in t up to where the density almost vanishes, so that no cell is empty for large m.
    reach = min(np.pi / 2, 4.0 / np.sqrt(subspace_dim))
    thresholds = np.sin(np.linspace(0, reach, count + 1)[1:-1])
    for _ in range(20_000):
        levels = _conditional_means(np.concatenate([[0.0], thresholds, [1.0]]), subspace_dim)
        updated = (levels[1:] + levels[:-1]) / 2
        if np.max(np.abs(updated - thresholds)) < 1e-13:
            break
        thresholds = updated
    for array in (thresholds, levels):
        array.setflags(write=False)
    return thresholds, levels


@cache
def _gauss_legendre() -> tuple[np.ndarray, np.ndarray]:
    """Nodes and weights on [-1, 1], cached because computing them is slow."""
    return np.polynomial.legendre.leggauss(48)


def _conditional_means(edges: np.ndarray, m: int) -> np.ndarray:
    """E[X | edge_t <= X < edge_(t+1)] for consecutive edges."""
    angles = np.arcsin(edges)
    nodes, node_weights = _gauss_legendre()
    low, high = angles[:-1, None], angles[1:, None]
    t = (high - low) / 2 * nodes + (high + low) / 2
    mass = ((high - low) / 2 * node_weights * np.cos(t) ** (m - 2)).sum(axis=1)
    cosines = np.cos(angles) ** (m - 1)
    cosines[-1] = 0.0  # cos(pi/2) is 6e-17 in floating point
    return (cosines[:-1] - cosines[1:]) / (m - 1) / mass

"""The shared rotation: orthogonal for every head size, the same everywhere, Hadamard where it can be."""

from __future__ import annotations

import pytest
import torch

from kvrecall.index.sphere.maps import rotation_matrix
from tests.strategies import HEAD_DIMS, gaussian


@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("seed", [0, 42, 2**31])
def test_orthogonal(dim: int, seed: int) -> None:
    matrix = rotation_matrix(dim, seed).double()
    assert matrix.shape == (dim, dim)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(dim, dtype=torch.float64), atol=1e-6, rtol=0)


@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_inner_products_survive(dim: int) -> None:
    keys, queries = gaussian(0, 111, dim).double(), gaussian(1, 63, dim).double()
    matrix = rotation_matrix(dim, 42).double()
    torch.testing.assert_close((keys @ matrix.T) @ (queries @ matrix.T).T, keys @ queries.T, atol=1e-4, rtol=0)


@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_seed_decides(dim: int) -> None:
    first = rotation_matrix(dim, 7).clone()
    rotation_matrix.cache_clear()
    torch.manual_seed(123)  # the global generator plays no part, and is not disturbed
    state = torch.get_rng_state()
    assert torch.equal(rotation_matrix(dim, 7), first)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.allclose(rotation_matrix(dim, 8), first)


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_power_of_two_is_a_signed_hadamard_matrix(dim: int) -> None:
    """Entry (i, j) of the Hadamard matrix is the parity of i & j; the rest are one sign per column and the scale."""
    signed = (rotation_matrix(dim, 42) * dim**0.5).round()
    parity = torch.tensor([[(-1) ** (i & j).bit_count() for j in range(dim)] for i in range(dim)])
    signs = signed[0]  # the first row of a Hadamard matrix is all ones
    assert set(signs.tolist()) == {-1.0, 1.0}
    assert torch.equal(signed, parity * signs)
    assert torch.equal(rotation_matrix(dim, 42).abs(), torch.full((dim, dim), dim**-0.5))


@pytest.mark.parametrize("dim", [80, 96, 192])
def test_other_sizes_mix_all_coordinates(dim: int) -> None:
    """No coordinate keeps its own axis and no block of outputs depends on a part of the inputs only."""
    matrix = rotation_matrix(dim, 42)
    assert matrix.abs().max() < 0.75
    energy = matrix.square().unflatten(0, (-1, 8)).sum(1)  # of each input coordinate in each block of 8 outputs
    assert energy.min() > 0 and energy.max() < 0.75


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_recorded_seed_gives_the_recorded_signs(dim: int) -> None:
    """Stored caches are read with the signs they were written with: these were drawn once and must never change."""
    recorded = "0100010001000010"
    signs = rotation_matrix(dim, 42)[0, :16] > 0
    assert "".join("1" if s else "0" for s in signs) == recorded

"""Small floats: order, range, rounding, and whole-number products with them."""

from __future__ import annotations

import torch

from kvrecall.core import small_floats
from tests.strategies import gaussian

CODES = torch.arange(256).to(torch.uint8)


def test_every_code_is_the_code_of_its_value() -> None:
    values = small_floats.unpack(CODES)
    assert torch.equal(small_floats.pack(values), CODES)
    assert values[0] == 0 and (values.diff() > 0).all()
    assert values[1].item() == small_floats.LEAST and values[255].item() == small_floats.LARGEST == 62.0
    assert values[160] == 1.0  # keys of the usual norm lie where neighbours are 6 % apart, and either way is far to go
    steps = values[2:] / values[1:-1]
    assert (steps > 1.03).all() and (steps <= 1.0625).all()


def test_values_are_rounded_to_the_nearest_and_held_within_the_range() -> None:
    values = gaussian(1, 4000).abs() * 3 + 0.01
    assert ((small_floats.unpack(small_floats.pack(values)) / values - 1).abs() <= 1 / 31).all()
    odd = torch.tensor([0.0, 1e-38, 1e-6, 61.9, 1e4, 3e38, float("inf")])
    assert small_floats.pack(odd).tolist() == [0, 1, 1, 255, 255, 255, 255]


def test_whole_numbers_times_values_are_exact() -> None:
    numbers = torch.tensor([-1408, -1, 0, 3, 1408]).unsqueeze(-1)
    products = small_floats.scaled_products(numbers, CODES[1:])
    assert torch.equal(products.double() / 2**small_floats.UNIT, numbers.double() * small_floats.unpack(CODES[1:]).double())
    assert products.abs().max() < 2**31  # kernels have 32 bits

"""Deterministic property tests: one profile, and the tensors they draw."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch import Tensor

HEAD_DIMS = (32, 64, 80, 96, 128, 192, 256)
MODES = ("mean_q", "mean_softmax", "max", "max_softmax", "per_head")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SEEDS = st.integers(0, 2**16)


def some_of_each(rows: Sequence[Any], columns: Sequence[Any], each: int) -> list[tuple[Any, Any]]:
    """Every row with `each` of the columns, other ones from row to row, so that every column occurs too: where each pair
    compiles kernels of its own, all of them take longer than they are worth."""
    return [(row, columns[(i * each + j) % len(columns)]) for i, row in enumerate(rows) for j in range(each)]


def examples(count: int, **more: Any) -> settings:
    """Settings of a property test: the same examples on every run and machine, no time limit per example."""
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    return settings(max_examples=count, deadline=None, derandomize=True, database=None, suppress_health_check=checks, **more)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def gaussian(seed: int, *shape: int) -> Tensor:
    """fp32 standard normal."""
    return torch.randn(*shape, generator=generator(seed))


def whole_numbers(seed: int, *shape: int, most: int = 3) -> Tensor:
    """fp32 integers in -most..most: their sums are exact in any order, and ties are frequent."""
    return torch.randint(-most, most + 1, shape, generator=generator(seed)).float()


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """All NaN: whatever is read without having been written shows in the result."""
    return torch.full(shape, float("nan"), dtype=dtype)

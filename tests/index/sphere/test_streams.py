"""How a layer's step is divided."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvrecall.index.sphere.streams import on_streams, split_heads, stream_count


@given(start=st.integers(0, 50), length=st.integers(1, 300), count=st.integers(1, 20))
def test_parts_are_all_of_it_in_order_and_alike(start: int, length: int, count: int) -> None:
    parts = split_heads(range(start, start + length), count)
    assert [i for part in parts for i in part] == list(range(start, start + length))
    assert len(parts) == min(count, length)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize(
    ("pairs", "tokens", "expected"),
    [(8, 131_072, 1), (2, 524_288, 1), (8, 262_144, 4), (8, 524_288, 4), (8, 1_048_576, 2), (224, 131_072, 14)],
)
def test_small_searches_stay_whole_and_large_ones_are_divided(pairs: int, tokens: int, expected: int) -> None:
    assert stream_count(pairs, tokens) == expected


def test_without_a_gpu_one_part_follows_another() -> None:
    done: list[range] = []
    on_streams([range(3), range(3, 5)], torch.zeros(1), done.append)
    assert done == [range(3), range(3, 5)]

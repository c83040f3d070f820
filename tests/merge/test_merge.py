"""Merging parts: any split gives the whole, an empty part is the identity, the logarithm is the natural one."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvrecall.attend.reference import softmax_rows
from kvrecall.core.structs import Partial
from kvrecall.merge import merge, merge_in_turn, with_sinks
from tests.strategies import SEEDS, examples, gaussian


def part(logits: torch.Tensor, values: torch.Tensor) -> Partial:
    """logits `[2, 2, 3, 1, n]`, values `[2, 2, n, 8]`: 2 sequences, 2 KV heads, groups of 3."""
    return softmax_rows(logits, values)


@examples(40)
@given(seed=SEEDS, cuts=st.lists(st.integers(0, 63), max_size=5), spread=st.sampled_from([0.1, 3.0, 60.0, 1e4]))
def test_any_split_gives_the_whole(seed: int, cuts: list[int], spread: float) -> None:
    """Empty pieces included, in any order. A part's weight is as wrong as the rounding of its log-sum-exp."""
    logits, values = spread * gaussian(seed, 2, 2, 3, 1, 63), gaussian(seed + 1, 2, 2, 63, 8)
    edges = [0, *sorted(cuts), 63]
    pieces = [part(logits[..., a:b], values[:, :, a:b]) for a, b in pairwise(edges)]
    merged, whole = merge(pieces[::-1]), part(logits.double(), values.double())
    rounding = 2**-23 * float(logits.abs().max() * values.abs().max())
    torch.testing.assert_close(merged.out.double(), whole.out, atol=1e-5 + rounding, rtol=1e-5)
    torch.testing.assert_close(merged.lse.double(), whole.lse, atol=1e-5, rtol=1e-6)
    assert merged.out.dtype == merged.lse.dtype == torch.float32


def test_an_empty_part_changes_nothing() -> None:
    some = part(gaussian(0, 2, 2, 3, 1, 20), gaussian(1, 2, 2, 20, 8))
    empty = Partial.empty_like(some.out)
    for parts in ([some, empty], [empty, some], [empty, some, empty]):
        merged = merge(parts)
        torch.testing.assert_close(merged.out, some.out, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(merged.lse, some.lse, rtol=1e-6, atol=1e-7)


def test_nothing_but_empty_parts_stays_empty() -> None:
    empty = Partial.empty_like(torch.empty(1, 4, 1, 64))
    for parts in ([empty], [empty, empty], [empty] * 3):
        merged = merge(parts)
        assert (merged.out == 0).all() and (merged.lse == float("-inf")).all()


def test_a_single_part_is_returned_as_it_is() -> None:
    some = part(gaussian(0, 2, 2, 3, 1, 5), gaussian(1, 2, 2, 5, 8))
    assert merge([some]) is some


@pytest.mark.parametrize("count", [1, 2, 3])
def test_parts_in_sixteen_bits_are_merged_in_fp32(count: int) -> None:
    parts = [part(gaussian(i, 1, 2, 3, 4, 5), gaussian(9 + i, 1, 2, 5, 8)) for i in range(count)]
    narrow = [Partial(each.out.bfloat16(), each.lse) for each in parts]
    expected = merge([Partial(each.out.float(), each.lse) for each in narrow])
    for made in (merge(narrow), merge_in_turn(narrow[:1], iter(narrow[1:]))):
        assert made.out.dtype == torch.float32 and torch.equal(made.out, expected.out) and torch.equal(made.lse, expected.lse)


def test_log_sum_exp_is_natural() -> None:
    one = part(torch.zeros(1, 1, 1, 1, 5), torch.ones(1, 1, 5, 8))
    assert one.lse.item() == pytest.approx(math.log(5))
    two = merge([one, part(torch.full((1, 1, 1, 1, 1), math.log(3)), torch.zeros(1, 1, 1, 8))])
    assert two.lse.item() == pytest.approx(math.log(8))
    torch.testing.assert_close(two.out, torch.full((1, 1, 1, 8), 5 / 8))


def test_far_apart_parts_do_not_overflow() -> None:
    low, high = (part(torch.full((1, 1, 1, 1, 2), x), torch.full((1, 1, 2, 8), x)) for x in (-1e30, 1e30))
    merged = merge([low, high])
    assert torch.isfinite(merged.lse).all() and torch.equal(merged.out, high.out)


@examples(15)
@given(seed=SEEDS)
def test_learned_sinks_take_mass_and_give_no_value(seed: int) -> None:
    logits, values, sinks = gaussian(seed, 2, 2, 3, 1, 20), gaussian(seed + 1, 2, 2, 20, 8), gaussian(seed + 2, 6)
    some = part(logits, values)
    merged = merge(with_sinks([some], sinks.bfloat16().float()))
    extra = sinks.bfloat16().float().view(1, 2, 3, 1, 1).expand(2, 2, 3, 1, 1)
    whole = part(torch.cat([logits, extra], -1), torch.cat([values, torch.zeros(2, 2, 1, 8)], 2))
    torch.testing.assert_close(merged.out, whole.out, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(merged.lse, whole.lse, atol=1e-6, rtol=1e-5)

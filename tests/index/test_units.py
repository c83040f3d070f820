"""Units of tokens: joining, leaving out, scoring and filling a budget, against naive code."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvrecall.index import units
from kvrecall.index.units import Units, cpu
from tests.strategies import DTYPES, SEEDS, examples, gaussian, generator, whole_numbers

CPU = torch.device("cpu")
SIZES = st.lists(st.sampled_from([0, 0, 1, 2, 3, 7]), max_size=9)
Groups = list[list[list[int]]]
"""Token ids by head and unit."""


def random_units(seed: int, sizes: Sequence[int], heads: int = 2, first: int = 0) -> Units:
    """Tokens first, first + 1, ... dealt out to units; every head has the sizes in an order of its own."""
    rng, tokens = generator(seed), sum(sizes)
    members, offsets = torch.empty(heads, tokens, dtype=torch.int32), torch.zeros(heads, len(sizes) + 1, dtype=torch.int32)
    for h in range(heads):
        own = [sizes[i] for i in torch.randperm(len(sizes), generator=rng).tolist()]
        dealt = torch.randperm(tokens, generator=rng).int() + first
        members[h] = torch.cat([*(part.sort().values for part in dealt.split(own)), dealt[:0]])
        offsets[h, 1:] = torch.tensor(own, dtype=torch.int32).cumsum(0)
    return Units(gaussian(seed, heads, len(sizes), 5), members, offsets)


def groups(some: Units) -> Groups:
    """The units as plain lists."""
    return [
        [ids[a:b] for a, b in pairwise(ends)] for ids, ends in zip(some.members.tolist(), some.offsets.tolist(), strict=True)
    ]


def naive_fill(scores: list[float], tokens: list[list[int]], top_k: int) -> list[int]:
    """Best unit first, the lower one among equals, until the budget is full."""
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    return [token for i in order for token in tokens[i]][:top_k]


def check_well_formed(some: Units) -> None:
    assert some.members.dtype == some.offsets.dtype == torch.int32
    assert some.offsets.shape == (some.reps.shape[0], some.reps.shape[1] + 1)
    assert some.sizes.tolist() == [[len(unit) for unit in head] for head in groups(some)]
    assert all(unit == sorted(set(unit)) for head in groups(some) for unit in head)


def test_no_units() -> None:
    none = Units.none(3, 8, torch.bfloat16, CPU)
    check_well_formed(none)
    assert groups(none) == [[], [], []] and none.reps.shape == (3, 0, 8) and none.reps.dtype == torch.bfloat16


def test_bytes_are_those_of_the_tensors() -> None:
    assert random_units(0, [2, 0, 3]).nbytes == 4 * 2 * (3 * 5 + 5 + 4)


@examples(40)
@given(seed=SEEDS, one=SIZES, other=SIZES)
def test_joined_equals_lists_side_by_side(seed: int, one: list[int], other: list[int]) -> None:
    a, b = random_units(seed, one), random_units(seed + 1, other, first=sum(one))
    both = a.joined(b)
    check_well_formed(both)
    assert groups(both) == [x + y for x, y in zip(groups(a), groups(b), strict=True)]
    assert torch.equal(both.reps, torch.cat([a.reps, b.reps], 1))
    assert groups(a) == groups(random_units(seed, one))  # left alone


@examples(20)
@given(seed=SEEDS, sizes=SIZES)
def test_joined_with_none_is_the_same(seed: int, sizes: list[int]) -> None:
    some, none = random_units(seed, sizes), Units.none(2, 5, torch.float32, CPU)
    assert groups(none.joined(some)) == groups(some.joined(none)) == groups(some)


@examples(40)
@given(seed=SEEDS, sizes=SIZES, data=st.data())
def test_without_equals_filtered_lists(seed: int, sizes: list[int], data: st.DataObject) -> None:
    some = random_units(seed, sizes)
    count = data.draw(st.integers(0, sum(sizes)))
    ids = torch.stack([torch.randperm(sum(sizes), generator=generator(seed + h))[:count] for h in range(2)]).int()
    less = some.without(ids)
    check_well_formed(less)
    kept = [
        [[t for t in unit if t not in gone] for unit in head] for head, gone in zip(groups(some), ids.tolist(), strict=True)
    ]
    assert groups(less) == kept
    assert torch.equal(less.reps, some.reps) and groups(some) == groups(random_units(seed, sizes))


@examples(60)
@given(seed=SEEDS, sizes=SIZES, sets=st.integers(1, 3), top_k=st.integers(0, 40), ties=st.sampled_from([0, 1, 1000]))
def test_both_fills_equal_the_naive_one(seed: int, sizes: list[int], sets: int, top_k: int, ties: int) -> None:
    some = random_units(seed, sizes)
    ranked = whole_numbers(seed, 2, sets, len(sizes), most=ties)
    expected = [
        [naive_fill(scores, own, top_k) for scores in head] for head, own in zip(ranked.tolist(), groups(some), strict=True)
    ]
    for found in (units.fill_budget(ranked, some, top_k), cpu.fill_budget(ranked, some.members, some.offsets, top_k)):
        assert found.dtype == torch.int32 and found.shape == (2, sets, min(top_k, sum(sizes)))
        assert found.tolist() == expected


@pytest.mark.parametrize("top_k", [0, 1, 5, 6, 7, 100, 700, 701, 702, 5000])
def test_fills_agree_on_many_units_with_empty_ones_at_minus_infinity(top_k: int) -> None:
    some = random_units(3, [0, 1, 2, 4] * 100, heads=3)
    ranked = whole_numbers(4, 3, 2, 400, most=9) / 8
    ranked.masked_fill_((some.sizes == 0).unsqueeze(1), float("-inf"))
    plain = units.fill_budget(ranked, some, top_k)
    assert torch.equal(plain, cpu.fill_budget(ranked, some.members, some.offsets, top_k))
    assert plain.shape == (3, 2, min(top_k, 700)) and (plain >= 0).all()


def test_fill_cuts_the_last_unit_behind_its_lowest_tokens() -> None:
    some = Units(torch.zeros(1, 3, 1), torch.tensor([[4, 5, 0, 2, 6, 1, 3]]).int(), torch.tensor([[0, 2, 5, 7]]).int())
    ranked = torch.tensor([[[1.0, 3.0, 2.0]]])

    def on_cpu(ranked: torch.Tensor, some: Units, top_k: int) -> torch.Tensor:
        return cpu.fill_budget(ranked, some.members, some.offsets, top_k)

    for fill in (units.fill_budget, on_cpu):
        assert fill(ranked, some, 2).tolist() == [[[0, 2]]]
        assert fill(ranked, some, 4).tolist() == [[[0, 2, 6, 1]]]
        assert fill(ranked, some, 6).tolist() == [[[0, 2, 6, 1, 3, 4]]]


def test_fill_reads_strided_tensors() -> None:
    some = random_units(5, [3, 1, 2])
    spread = Units(some.reps, torch.stack([some.members] * 2, -1)[..., 0], some.offsets[:1].expand(2, -1))
    ranked = torch.stack([gaussian(6, 2, 1, 3)] * 2, -1)[..., 0]
    assert torch.equal(units.fill_budget(ranked, spread, 4), cpu.fill_budget(ranked, spread.members, spread.offsets, 4))


@pytest.mark.parametrize("dtype", DTYPES)
@examples(15)
@given(
    seed=SEEDS, group=st.integers(1, 4), count=st.sampled_from([0, 1, 5, 511, 512, 513]), width=st.sampled_from([1, 64, 130])
)
def test_inner_products_equal_float64(dtype: str, seed: int, group: int, count: int, width: int) -> None:
    queries, reps = 5 * gaussian(seed, 2, group, width), gaussian(seed + 1, 2, count, width).to(DTYPES[dtype])
    expected = torch.einsum("hgd,hud->hgu", queries.double(), reps.double())
    bound = torch.einsum("hgd,hud->hgu", queries.double().abs(), reps.double().abs())
    for found in (cpu.inner_products(queries, reps), units.inner_products(queries, reps)):
        assert found.dtype == torch.float32 and found.shape == (2, group, count)
        assert ((found.double() - expected).abs() <= 2**-24 * expected.abs() + 1e-13 * bound).all()


def test_equal_units_score_the_same_wherever_they_lie() -> None:
    queries, reps = gaussian(1, 2, 3, 96), gaussian(2, 2, 1, 96).expand(2, 1500, 96)
    found = cpu.inner_products(queries, reps)
    assert torch.equal(found, found[:, :, :1].expand_as(found))
    assert torch.equal(found, cpu.inner_products(queries, reps.contiguous()))

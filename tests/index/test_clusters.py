"""LouisKV's units: k-means of the prompt, segments of what was generated, against naive code."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import kvrecall
from kvrecall.core.errors import ParameterError
from kvrecall.core.structs import Budget
from kvrecall.index.units import Units
from kvrecall.index.units.clusters import ClusterConfig, ClusterIndex
from kvrecall.layer.state import LayerState
from tests.index.test_kmeans import naive_cluster
from tests.one_layer import ZONES, index_keys, layer
from tests.strategies import SEEDS, examples, gaussian

DIM = 8


class Zone:
    """A cluster index with the retrieval zone it is bound to."""

    def __init__(self, sequences: int = 1, dtype: torch.dtype = torch.float32, **config: Any) -> None:
        given: dict[str, Any] = {"cluster_tokens": 4, "stretch_tokens": 16, "max_segment_tokens": 8} | config
        method = kvrecall.Method(index=ClusterConfig(**given), top_k=5, **ZONES)
        self.state: LayerState = layer(method, sequences, dtype, DIM)

    @property
    def index(self) -> ClusterIndex:
        assert isinstance(self.state.index, ClusterIndex)
        return self.state.index

    def prompt(self, keys: Tensor, sequence: int = 0) -> Zone:
        index_keys(self.state, sequence, keys)
        return self

    def generated(self, keys: Tensor, sequence: int = 0) -> Zone:
        rows = torch.stack([keys, keys], 2)
        self.state.store.host[sequence].append(rows)
        self.state.absorb(sequence, rows, generated=True)
        return self

    def truncate(self, tokens: int) -> Zone:
        self.state.store.host[0].truncate(tokens)
        self.index.truncate(0, tokens)
        return self

    def groups(self, sequence: int = 0) -> list[list[list[int]]]:
        """Token ids by head and unit."""
        units = self.index.units(sequence)
        return [
            [ids[a:b] for a, b in pairwise(ends)]
            for ids, ends in zip(units.members.tolist(), units.offsets.tolist(), strict=True)
        ]


def same(a: Zone, b: Zone, sequence: int = 0, other: int = 0) -> bool:
    """Whether two sequences have equal units."""
    one, two = a.index.units(sequence), b.index.units(other)
    return all(torch.equal(getattr(one, name), getattr(two, name)) for name in ("reps", "members", "offsets"))


def oracle(zone: Zone, keys: Tensor, queries: Tensor, top_k: int, scaling: float, sequence: int = 0) -> list[list[int]]:
    """Mean over the group's heads of the softmax over units, the budget filled by token, in plain Python."""
    chosen, group = [], queries.shape[0] // keys.shape[0]
    for h, units in enumerate(zone.groups(sequence)):
        filled = [u for u in units if u]
        shares = [0.0] * len(filled)
        for query in queries[h * group : (h + 1) * group].double():
            logits = [float(query @ keys[h, unit].double().mean(0)) * scaling for unit in filled]
            total = sum(math.exp(x) for x in logits)
            shares = [s + math.exp(x) / total / group for s, x in zip(shares, logits, strict=True)]
        order = sorted(range(len(filled)), key=lambda i: -shares[i])
        chosen.append(sorted([token for i in order for token in filled[i]][:top_k]))
    return chosen


def found(zone: Zone, queries: Tensor, top_k: int, scaling: float = 0.5, sequence: int = 0) -> list[list[int]]:
    selection = zone.index.search(queries.unsqueeze(0), Budget(top_k, scaling), [sequence])
    return [row[:n] for row, n in zip(selection.ids[0].tolist(), selection.counts[0].tolist(), strict=True)]


@examples(40)
@given(seed=SEEDS, count=st.integers(1, 90), segments=st.lists(st.integers(1, 8), max_size=4))
def test_units_partition_the_tokens_and_are_represented_by_their_mean_key(seed: int, count: int, segments: list[int]) -> None:
    zone = Zone().prompt(gaussian(seed, 2, count, DIM))
    for i, length in enumerate(segments):
        zone.generated(gaussian(seed + i + 1, 2, length, DIM))
    total = count + sum(segments)
    keys = torch.cat([block[:, :, 0] for block in zone.state.store.host[0].blocks()], 1)
    assert zone.index.lengths == [total] and keys.shape[1] == total
    stretches = [min(16, count - start) for start in range(0, count, 16)]
    for h, units in enumerate(zone.groups()):
        assert sorted(token for unit in units for token in unit) == list(range(total))
        assert all(unit == sorted(unit) for unit in units)
        assert len(units) == sum(-(-s // 4) for s in stretches) + len(segments)  # clusters hold 4 tokens in the mean
        for i, unit in enumerate(units):
            if unit:
                assert max(unit) // 16 == min(unit) // 16 or min(unit) >= count  # no cluster leaves its stretch
                torch.testing.assert_close(zone.index.units(0).reps[h, i], keys[h, unit].mean(0))


@examples(40)
@given(seed=SEEDS, chunks=st.lists(st.integers(1, 30), min_size=1, max_size=6), looking=st.booleans())
def test_units_do_not_depend_on_the_chunks_of_the_prompt(seed: int, chunks: list[int], looking: bool) -> None:
    keys = gaussian(seed, 2, sum(chunks), DIM)
    whole, cut = Zone().prompt(keys), Zone()
    for part in keys.split(chunks, 1):
        cut.prompt(part)
        if looking:  # a decode step between two chunks clusters the unfinished stretch for the time being
            cut.index.end_of_prompt(0, None, 0)
    assert same(whole, cut)


def test_a_finished_stretch_stays_and_the_unfinished_one_is_clustered_again() -> None:
    keys = gaussian(5, 2, 48, DIM)
    zone = Zone().prompt(keys[:, :26])
    before = zone.groups()
    zone.prompt(keys[:, 26:30])
    after = zone.groups()
    for head in range(2):
        assert before[head][:4] == after[head][:4]
        assert sorted(t for unit in after[head][4:] for t in unit) == list(range(16, 30))
    expected = [[[16 + i for i, a in enumerate(naive_cluster(keys[h, 16:30].tolist(), 4, 10)) if a == c] for c in range(4)]
                for h in range(2)]  # fmt: skip
    assert [units[4:] for units in after] == expected


def test_each_generated_segment_is_one_unit_of_its_own() -> None:
    zone, keys = Zone().prompt(gaussian(1, 2, 6, DIM)), gaussian(2, 2, 14, DIM)
    for part in keys.split([5, 1, 8], 1):
        zone.generated(part)
    for units in zone.groups():
        assert units[2:] == [[6, 7, 8, 9, 10], [11], list(range(12, 20))]
    reps = zone.index.units(0).reps
    torch.testing.assert_close(reps[:, 2:], torch.stack([part.mean(1) for part in keys.split([5, 1, 8], 1)], 1))


def test_half_precision_means_are_rounded_once() -> None:
    keys = gaussian(4, 2, 40, DIM).bfloat16()
    zone = Zone(dtype=torch.bfloat16).prompt(keys)
    reps = zone.index.units(0).reps
    assert reps.dtype == torch.bfloat16
    for h, units in enumerate(zone.groups()):
        for i, unit in enumerate(units):
            assert not unit or torch.equal(reps[h, i], keys[h, unit].double().mean(0).bfloat16())


@pytest.mark.parametrize(("tokens", "border"), [(47, 47), (45, 42), (42, 42), (35, 32), (20, 16), (3, 0)])
def test_truncate_goes_back_to_a_border_and_the_rest_is_clustered_again(tokens: int, border: int) -> None:
    prompt, segments = gaussian(1, 2, 38, DIM), gaussian(2, 2, 9, DIM).split([4, 5], 1)
    every = torch.cat([prompt, *segments], 1)
    zone, expected = Zone().prompt(prompt), Zone().prompt(prompt[:, :border])
    for ends, part in zip((42, 47), segments, strict=True):
        zone.generated(part)
        if ends <= border:
            expected.generated(part)
    zone.truncate(tokens)
    if tokens > border:
        expected.prompt(every[:, border:tokens])
    assert zone.index.lengths == [tokens] and same(zone, expected)
    for more in (gaussian(7, 2, 21, DIM), gaussian(8, 2, 3, DIM)):  # and it goes on as if the rest had never been
        assert same(zone.prompt(more), expected.prompt(more))
    assert same(zone.generated(more), expected.generated(more))


def test_truncate_to_the_end_of_the_prompt_keeps_all_its_clusters() -> None:
    zone, segment = Zone().prompt(gaussian(1, 2, 38, DIM)), gaussian(2, 2, 5, DIM)
    before = zone.groups()
    zone.generated(segment).truncate(40)
    assert [units[: len(b)] for units, b in zip(zone.groups(), before, strict=True)] == before
    assert zone.truncate(38).groups() == before
    assert zone.generated(segment).groups() == [[*units, list(range(38, 43))] for units in before]


def test_truncate_behind_the_end_changes_nothing() -> None:
    zone = Zone().prompt(gaussian(1, 2, 30, DIM))
    before = zone.groups()
    zone.index.truncate(0, 30)
    zone.index.truncate(0, 99)
    assert zone.groups() == before and zone.index.lengths == [30]


def test_excluded_tokens_leave_their_units_until_they_are_let_in_again() -> None:
    zone = Zone().prompt(gaussian(1, 2, 30, DIM))
    before, excluded = zone.groups(), torch.tensor([[0, 7, 29], [1, 2, 16]], dtype=torch.int32)
    zone.index.exclude(0, excluded)
    expected = [
        [[t for t in unit if t not in gone] for unit in units] for units, gone in zip(before, excluded.tolist(), strict=True)
    ]
    assert zone.groups() == expected and zone.index.lengths == [30]
    queries = gaussian(2, 6, DIM)
    assert found(zone, queries, 100) == [sorted(set(range(30)) - set(gone)) for gone in excluded.tolist()]
    zone.generated(gaussian(3, 2, 4, DIM))
    for units, gone in zip(zone.groups(), excluded.tolist(), strict=True):
        assert sorted(t for unit in units for t in unit) == sorted(set(range(34)) - set(gone))
    zone.index.exclude(0, None)
    assert [units[:-1] for units in zone.groups()] == before
    zone.index.exclude(0, excluded)
    zone.truncate(20)
    assert [sorted(t for unit in units for t in unit) for units in zone.groups()] == [list(range(20))] * 2


def test_selected_sequences_go_on_alone() -> None:
    zone = Zone(2)
    keys = [gaussian(b, 2, 22 + b, DIM) for b in range(2)]
    for b in range(2):
        zone.prompt(keys[b], b)
    zone.index.exclude(1, torch.tensor([[3], [4]], dtype=torch.int32))
    copy = Zone(3)
    copy.state = zone.state.select([1, 0, 1])
    before = [copy.groups(i) for i in range(3)]
    assert before == [zone.groups(1), zone.groups(0), zone.groups(1)]
    zone.generated(gaussian(9, 2, 4, DIM), 1).prompt(gaussian(8, 2, 13, DIM), 0).truncate(5)
    zone.index.exclude(1, None)
    copy.generated(gaussian(7, 2, 3, DIM), 2)
    assert [copy.groups(i) for i in range(2)] == before[:2]
    alone = Zone().prompt(keys[1])
    alone.index.exclude(0, torch.tensor([[3], [4]], dtype=torch.int32))
    alone.generated(gaussian(7, 2, 3, DIM))
    assert same(copy, alone, 2)


@examples(60)
@given(
    seed=SEEDS, count=st.integers(1, 60), segments=st.lists(st.integers(1, 8), max_size=3), top_k=st.integers(1, 70),
    excluding=st.booleans(),
)  # fmt: skip
def test_search_is_the_brute_force_oracle(seed: int, count: int, segments: list[int], top_k: int, excluding: bool) -> None:
    zone = Zone(2).prompt(gaussian(seed + 50, 2, 9, DIM), 0).prompt(gaussian(seed, 2, count, DIM), 1)
    for i, length in enumerate(segments):
        zone.generated(gaussian(seed + i + 1, 2, length, DIM), 1)
    host, queries = zone.state.store.host[1], 2 * gaussian(seed + 9, 6, DIM)
    keys = torch.cat([block[:, :, 0] for block in host.blocks()], 1)
    if not excluding:
        assert found(zone, queries, top_k, 0.4, 1) == oracle(zone, keys, queries, top_k, 0.4, 1)
        return
    units, reps = zone.groups(1), zone.index.units(1).reps.clone()
    zone.index.exclude(1, torch.zeros(2, 1, dtype=torch.int32))
    assert torch.equal(zone.index.units(1).reps, reps)  # a unit is still judged by all its keys
    for h, ids in enumerate(found(zone, queries, 1000, 0.4, 1)):
        assert ids == sorted(t for unit in units[h] for t in unit if t)


@pytest.mark.parametrize(("mode", "best"), [("mean_softmax", 1), ("mean_q", 0), ("max", 0)])
def test_one_loud_head_does_not_outvote_two_others(mode: str, best: int) -> None:
    zone, axes = Zone(gqa=mode), torch.eye(DIM)
    for key in (10 * axes[0], 9 * axes[1]):
        zone.generated(key.expand(2, 2, DIM))
    queries = torch.stack([10 * axes[0], axes[1], axes[1]]).repeat(2, 1)
    assert found(zone, queries, 2, 1.0) == [[2 * best, 2 * best + 1]] * 2


@pytest.mark.parametrize(("lead", "chosen"), [(-0.1, 1), (0.1, 0)])
def test_size_correction_weighs_a_unit_by_the_logarithm_of_its_tokens(lead: float, chosen: int) -> None:
    scaling, axis = 0.25, torch.eye(DIM)[0]
    single = axis * (math.log(8) + lead) / scaling  # its logit is log 8 above that of eight tokens, and a little more or less
    for correction, expected in [(False, 0), (True, chosen)]:
        zone = Zone(size_correction=correction)
        zone.generated(single.expand(2, 1, DIM)).generated((0 * axis).expand(2, 8, DIM))
        assert found(zone, axis.expand(6, DIM), 1, scaling) == [[expected]] * 2


@pytest.mark.parametrize("name", ["cluster_tokens", "stretch_tokens", "iterations", "max_segment_tokens"])
@pytest.mark.parametrize("value", [0, -1, 2.0, "4"])
def test_impossible_sizes_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ParameterError, match=name):
        ClusterConfig(**{name: value})
    with pytest.raises(ParameterError, match="stretch_tokens"):
        ClusterConfig(cluster_tokens=16, stretch_tokens=15)


def test_the_estimate_of_a_summary_is_what_it_takes() -> None:
    config = ClusterConfig(cluster_tokens=4, stretch_tokens=1000)
    zone = Zone(cluster_tokens=4, stretch_tokens=1000).prompt(gaussian(1, 2, 50, DIM))
    zone.index.end_of_prompt(0, None, 0)
    assert zone.index.nbytes == config.nbytes(zone.state.shape, 50)


def test_nbytes_counts_every_tensor_that_is_held() -> None:
    zone = Zone().prompt(gaussian(1, 2, 40, DIM))
    zone.index.end_of_prompt(0, None, 0)  # two finished stretches, and one for the time being
    units = [one for held in vars(zone.index).values() if isinstance(held, list) for one in held if isinstance(one, Units)]
    tensors = {x.data_ptr(): x.numel() * x.element_size() for one in units for x in (one.reps, one.members, one.offsets)}
    assert zone.index.nbytes == sum(tensors.values())

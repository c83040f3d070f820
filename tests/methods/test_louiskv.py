"""LouisKV on one layer: each mechanism that its docstring names has a test that fails without it."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import kvrecall
from kvrecall.index.units.clusters import ClusterConfig, ClusterIndex
from kvrecall.layer.pipeline import decode_step, prefill_layer
from kvrecall.layer.state import LayerState
from kvrecall.trigger import SemanticBoundary
from tests.one_layer import ZONES, dense, layer, normal, params

SMALL: dict[str, Any] = {
    "top_k": 7, "cluster_tokens": 4, "stretch_tokens": 32, "max_segment_tokens": 8, "dense_layers": (), **ZONES,
}  # fmt: skip
ROW = 2 * 64 * 4
"""Bytes of one row K|V of one head."""


def louis(**changes: Any) -> kvrecall.LouisKV:
    return kvrecall.LouisKV(**(SMALL | changes))


class Course:
    """A prompt and decode steps whose queries keep a direction until told to turn; remembers every token."""

    def __init__(self, method: kvrecall.Method, lengths: Iterable[int] = (60,), number: int = 0) -> None:
        lengths = list(lengths)
        shape = layer(method, len(lengths)).shape
        self.state = LayerState(number, shape, method)
        self.directions, self.steps = [0] * len(lengths), 0
        self.keys, self.values = ([torch.empty(2, 0, 64) for _ in lengths] for _ in range(2))
        self.searched: list[list[int]] = []
        self.state.on_search = lambda queries, budget, sequences: self.searched[-1].extend(sequences)
        self.prompt(lengths)

    def prompt(self, lengths: Iterable[int]) -> None:
        lengths = list(lengths)
        q, k, v = (normal(len(lengths), h, max(lengths), 64, seed=7 + i + 50 * self.steps) for i, h in enumerate((6, 2, 2)))
        valid = torch.arange(max(lengths)) >= max(lengths) - torch.tensor(lengths).unsqueeze(1)
        prefill_layer(self.state, q, k, v, valid, params())
        for b in range(len(lengths)):
            self.keys[b] = torch.cat([self.keys[b], k[b][:, valid[b]]], 1)
            self.values[b] = torch.cat([self.values[b], v[b][:, valid[b]]], 1)

    def queries(self) -> Tensor:
        """`[B, 6, 64]`: the sequence's direction and a little noise, so the cosine to the step before is near 1."""
        found = [normal(6, 64, seed=1000 + 10 * d + b) for b, d in enumerate(self.directions)]
        return torch.stack(found) + 0.05 * normal(len(found), 6, 64, seed=5000 + self.steps)

    def step(self, turning: Iterable[int] = (), queries: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """One decode step in which some sequences turn: (queries, output), each `[B, H_q, D]`."""
        for b in turning:
            self.directions[b] += 1
        self.steps += 1
        q = self.queries() if queries is None else queries
        k, v = (normal(len(self.keys), 2, 1, 64, seed=90_000 + 2 * self.steps + i) for i in range(2))
        for b in range(len(self.keys)):
            self.keys[b] = torch.cat([self.keys[b], k[b]], 1)
            self.values[b] = torch.cat([self.values[b], v[b]], 1)
        self.searched.append([])
        return q, decode_step(self.state, q.unsqueeze(2), k, v, None, params())[:, :, 0]

    def run(self, steps: int, turns: Iterable[int] = ()) -> Course:
        """Steps of the first sequence, which turns at those of these numbers (the first step of all is 0)."""
        for _ in range(steps):
            self.step([0] if self.steps in turns else [])
        return self

    @property
    def searching_steps(self) -> list[int]:
        return [number for number, sequences in enumerate(self.searched) if 0 in sequences]


def units(state: LayerState, sequence: int = 0) -> list[list[list[int]]]:
    """Token ids by head and unit."""
    assert isinstance(state.index, ClusterIndex)
    made = state.index.units(sequence)
    return [[ids[a:b] for a, b in pairwise(ends)]
            for ids, ends in zip(made.members.tolist(), made.offsets.tolist(), strict=True)]  # fmt: skip


def expected_ids(course: Course, queries: Tensor, corrected: bool = False) -> list[list[int]]:
    """The budget filled by token, best unit first, by the mean over the group of the softmax of q · mean key."""
    found = []
    for h, groups in enumerate(units(course.state)):
        filled, zone = [u for u in groups if u], course.keys[0][h, 4:].double()
        logits = queries[3 * h : 3 * h + 3].double() @ torch.stack([zone[u].mean(0) for u in filled]).T / 8
        if corrected:
            logits += torch.tensor([float(len(u)) for u in filled]).log()
        order = logits.softmax(-1).mean(0).argsort(descending=True).tolist()
        found.append(sorted([token for i in order for token in filled[i]][:7]))
    return found


def generated_units(course: Course, first: int) -> list[list[int]]:
    """Units of the tokens from position `first` on, by position; the same for both heads."""
    found = [[[token + 4 for token in unit] for unit in head if unit and unit[0] + 4 >= first] for head in units(course.state)]
    assert found[0] == found[1]
    return found[0]


def test_a_step_searches_where_the_query_turned_and_only_in_the_sequence_that_turned() -> None:
    course = Course(louis(), [60, 45, 70])
    turns = {2: [1], 5: [0, 2], 6: [1], 9: [0]}
    for number in range(12):
        course.step(turns.get(number, []))
    assert course.searched == [[0, 1, 2], *(turns.get(n, []) for n in range(1, 12))]
    assert course.state.stats.searches == 3 + 5


def test_layers_turn_by_themselves() -> None:
    turning, steady = Course(louis(), number=2), Course(louis(), number=3)
    assert turning.run(8, [4]).searching_steps == [0, 4] and steady.run(8).searching_steps == [0]


@pytest.mark.parametrize(("heads", "fires"), [(1, False), (2, True)])
def test_the_cosine_is_averaged_over_all_query_heads(heads: int, fires: bool) -> None:
    course, before = Course(louis()), torch.eye(64)[:6].unsqueeze(0)
    after = before.clone()
    after[0, :heads] = before[0, :heads].roll(20, -1)  # 1 - heads / 6, beside a threshold of 0.8
    course.step(queries=before)
    course.step(queries=after)
    assert course.searching_steps == ([0, 1] if fires else [0])


@pytest.mark.parametrize(("changes", "expected"), [
    ({"threshold": 0.9}, [0]), ({"threshold": 0.9, "compare": "retrieval"}, [0, 6, 12, 18]),
    ({"threshold": 0.9, "max_stride": 7}, [0, 7, 14]), ({"threshold": 0.999}, list(range(20))), ({"threshold": -1.0}, [0]),
])  # fmt: skip
def test_threshold_compare_and_max_stride_on_a_slow_drift(changes: dict[str, Any], expected: list[int]) -> None:
    course, axes = Course(louis(**changes)), torch.eye(64)
    for number in range(20):
        angle = torch.deg2rad(torch.tensor(5.0 * number))
        course.step(queries=(angle.cos() * axes[0] + angle.sin() * axes[1]).expand(1, 6, 64))
    assert course.searching_steps == expected


def test_between_turns_the_retrieved_set_and_its_rows_stay() -> None:
    course = Course(louis())
    held, counts = [], []
    for number in range(9):
        course.step([0] if number in (4, 7) else [])
        held.append(course.state.attended_ids(0))
        stats = course.state.stats
        counts.append((stats.searches, stats.bytes_fetched, stats.reused_rows, stats.bytes_saved))
    assert all(torch.equal(held[n], held[0 if n < 4 else 4 if n < 7 else 7]) for n in range(9))
    assert not torch.equal(held[0], held[4]) and not torch.equal(held[4], held[7])
    searches, quiet, rows = [1] * 4 + [2] * 3 + [3] * 2, [0, 1, 2, 3, 3, 4, 5, 5, 6], 2 * 7
    assert counts == [(s, s * rows * ROW, k * rows, k * rows * ROW) for s, k in zip(searches, quiet, strict=True)]


def test_with_reuse_a_search_reads_only_the_rows_that_are_new() -> None:
    course, plain = Course(louis(fetch="direct:reuse=true", top_k=14)), Course(louis(top_k=14))
    read, reused, before = 0, 0, [set[int](), set[int]()]
    for number in range(14):
        _, out = course.step([0] if number % 3 == 2 else [])
        assert torch.equal(out, plain.step([0] if number % 3 == 2 else [])[1])
        now = [set(ids) - {-1} for ids in course.state.attended_ids(0).tolist()]
        common = sum(len(a & b) for a, b in zip(before, now, strict=True))
        read, reused, before = read + 28 - common, reused + common, now
        assert (course.state.stats.bytes_fetched, course.state.stats.reused_rows) == (read * ROW, reused)
    assert read * ROW < plain.state.stats.bytes_fetched


@pytest.mark.parametrize("changes", [{}, {"attend": "host"}, {"fetch": "direct:reuse=true"}, {"gqa": "per_head"}], ids=str)
def test_output_is_dense_attention_over_attended_and_resident_tokens(changes: dict[str, Any]) -> None:
    course = Course(louis(**changes), [60, 41])
    for number in range(40):
        zones = [course.state.store.zones(b) for b in range(2)]
        queries, out = course.step([number % 2] if number % 5 == 0 else [])
        for b in range(2):
            keys, values = course.keys[b], course.values[b]
            window = list(range(4 + zones[b].retrieval, keys.shape[1]))
            for h, ids in enumerate(course.state.attended_ids(b).tolist()):
                at = [*range(4), *(i + 4 for i in ids if i >= 0), *window]
                assert len(set(at)) == len(at) and (len(at) == 4 + 7 + len(window) or "gqa" in changes)
                group = slice(3 * h, 3 * h + 3)
                expected = dense(queries[b, group], keys[h : h + 1, at], values[h : h + 1, at])
                torch.testing.assert_close(out[b, group], expected, atol=1e-5, rtol=1e-5)


def test_the_prompt_falls_into_clusters_of_the_wanted_mean_size() -> None:
    course = Course(louis(stretch_tokens=1000), [140]).run(1)  # 120 tokens of the prompt are in the retrieval zone
    for groups in units(course.state):
        assert len(groups) == 120 // 4 and sorted(t for u in groups for t in u) == list(range(120))
        assert any(u != list(range(u[0], u[0] + len(u))) for u in groups if u)  # similar keys, not neighbours


def test_stretches_of_the_prompt_are_clustered_by_themselves() -> None:
    for stretch, mixed in [(32, False), (1000, True)]:
        groups = [u for head in units(Course(louis(stretch_tokens=stretch), [140]).run(1).state) for u in head if u]
        assert any(u[0] // 32 != u[-1] // 32 for u in groups) == mixed


def test_generated_segments_end_at_turns_or_at_the_longest_and_leave_the_window_whole() -> None:
    course = Course(louis(), [40])  # 24 .. 39 are in the window
    for number in range(60):
        before = course.state.store.zones(0)
        course.step([0] if number in (3, 5, 12) else [])
        after = course.state.store.zones(0)
        due = before.buffer + 1 >= 8
        assert (after.retrieval > before.retrieval) == due
    ends = [24, 28, 32, 36, 40, 43, 45, 52, 60, 68, 76, 84]
    expected = [list(range(a, b)) for a, b in pairwise(ends)]
    found = generated_units(course, 24)
    assert len(found) >= 9 and found == expected[: len(found)]
    assert isinstance(course.state.index, ClusterIndex)
    reps, keys = course.state.index.units(0).reps, course.keys[0]
    for i, unit in enumerate(found):
        torch.testing.assert_close(reps[:, i - len(found)], keys[:, unit].mean(1))


@pytest.mark.parametrize(("changes", "length"), [
    ({"threshold": -1.0}, 8), ({"threshold": -1.0, "max_segment_tokens": 5}, 5), ({"threshold": -1.0, "max_stride": 3}, 3),
    ({"trigger": "fixed-stride:steps=6"}, 6), ({"trigger": "every-step"}, 4),
])  # fmt: skip
def test_segments_without_a_turn(changes: dict[str, Any], length: int) -> None:
    found = generated_units(Course(louis(**changes), [40]).run(60), 40)
    assert len(found) >= 3 and found == [list(range(40 + i * length, 40 + (i + 1) * length)) for i in range(len(found))]


def test_sequences_shed_segments_of_their_own() -> None:
    together, turns = Course(louis(), [40, 40]), {4: [0], 6: [1], 9: [0, 1]}
    for number in range(50):
        together.step(turns.get(number, []))
    for b, marks in enumerate(([40, 44, 49], [40, 46, 49])):
        found = [[token + 4 for token in unit] for unit in units(together.state, b)[0] if unit and unit[0] >= 36]
        assert [unit[0] for unit in found[:3]] == marks


@pytest.mark.parametrize("corrected", [False, True])
def test_units_are_ranked_by_the_mean_share_and_the_budget_is_filled_by_token(corrected: bool) -> None:
    course, differs = Course(louis(size_correction=corrected)), 0
    course.step()
    for number in range(20):
        zone, queries = course.state.store.zones(0).retrieval, 2 * normal(1, 6, 64, seed=300 + number)
        expected, otherwise = (expected_ids(course, queries[0], c) for c in (corrected, not corrected))
        course.step(queries=queries)
        found = course.state.attended_ids(0).tolist()
        assert found == expected and all(len(ids) == 7 and ids[-1] < zone for ids in found)
        differs += found != otherwise
    assert course.state.stats.searches == 21 and differs


def test_the_first_two_layers_stay_dense() -> None:
    method = kvrecall.LouisKV(**{k: v for k, v in SMALL.items() if k != "dense_layers"})
    for number in range(4):
        course = Course(method, number=number)
        queries, out = course.step()
        exact = dense(queries[0], course.keys[0], course.values[0])
        if number < 2:
            course.run(20, [5])
            assert course.state.index is None and course.state.stats.searches == 0
            torch.testing.assert_close(out[0], exact, atol=1e-5, rtol=1e-5)
        else:
            assert course.state.index is not None and course.state.stats.searches == 1
            assert not torch.allclose(out[0], exact, atol=1e-3)


def test_its_parameters_reach_its_parts() -> None:
    method = kvrecall.LouisKV(
        threshold=0.6, compare="retrieval", max_stride=9, cluster_tokens=5, stretch_tokens=50, max_segment_tokens=6,
        size_correction=True,
    )  # fmt: skip
    assert method.trigger_config() == SemanticBoundary(0.6, "retrieval", 9)
    assert method.index_config() == ClusterConfig("mean_softmax", 5, 50, max_segment_tokens=6, size_correction=True)


def test_a_sequence_that_grows_long_enough_is_searched_without_a_turn() -> None:
    course = Course(louis(), [31]).run(20)  # below 4 + 16 + 2 * 7 = 34 tokens everything is attended
    assert course.searching_steps == [2]


def test_a_cropped_sequence_searches_at_its_next_step() -> None:
    course = Course(louis(), [60, 60])
    for _ in range(5):
        course.step()
    course.state.crop(0, 62)
    course.keys[0], course.values[0] = course.keys[0][:, :62], course.values[0][:, :62]
    course.step()
    assert course.searched == [[0, 1], [], [], [], [], [0]]


def test_a_prompt_that_goes_on_is_searched_at_the_next_step() -> None:
    course = Course(louis()).run(5)
    course.prompt([60])  # the selection knows nothing of it
    course.run(3)
    assert course.searching_steps == [0, 5]

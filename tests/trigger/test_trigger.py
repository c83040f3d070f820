"""When a trigger fires: every step, at a fixed stride, and where the query turns, against naive code."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvrecall.core.errors import ParameterError, UnknownNameError
from kvrecall.trigger import EveryStep, FixedStride, SemanticBoundary, Trigger, mean_cosine
from tests.strategies import SEEDS, examples, gaussian

Config = EveryStep | FixedStride | SemanticBoundary
CONFIGS: list[Config] = [
    EveryStep(),
    FixedStride(3),
    SemanticBoundary(0.3),
    SemanticBoundary(0.3, "retrieval"),
    SemanticBoundary(0.3, max_stride=4),
]
each_config = pytest.mark.parametrize("config", CONFIGS, ids=str)


def at_angle(degrees: float, heads: int = 2) -> Tensor:
    """Queries `[1, heads, 2]` of different lengths, all at one angle."""
    turned = torch.tensor([math.cos(math.radians(degrees)), math.sin(math.radians(degrees))])
    return (turned * torch.arange(1.0, heads + 1).unsqueeze(1)).unsqueeze(0)


def run(config: Config, angles: list[float]) -> list[int]:
    """The steps that fire when a single sequence's queries take these angles."""
    trigger = config.build(1)
    return [step for step, angle in enumerate(angles) if trigger.fires(at_angle(angle), [0])[0]]


def wandering(seed: int, steps: int, sequences: int) -> Tensor:
    """Queries `[steps, sequences, 3, 8]` that stay near the last one or turn, at random."""
    turns = torch.rand(steps, sequences, generator=torch.Generator().manual_seed(seed)) < 0.4
    fresh, queries = gaussian(seed + 1, steps, sequences, 3, 8), []
    for t in range(steps):
        far = turns[t].view(-1, 1, 1)
        queries.append(torch.where(far, fresh[t], queries[-1] + 0.3 * fresh[t]) if queries else fresh[t])
    return torch.stack(queries)


def naive_cosine(query: list[list[float]], reference: list[list[float]]) -> float:
    """Mean over heads, in plain Python."""
    found = []
    for a, b in zip(query, reference, strict=True):
        lengths = math.sqrt(sum(x * x for x in a) * sum(x * x for x in b))
        found.append(sum(x * y for x, y in zip(a, b, strict=True)) / lengths)
    return sum(found) / len(found)


def naive_fires(config: SemanticBoundary, queries: list[list[list[float]]]) -> tuple[list[bool], float]:
    """Flags of one sequence, and how close any comparison came to the threshold."""
    flags: list[bool] = []
    last, margin = 0, 1.0
    for t, query in enumerate(queries):
        if not t:
            flags.append(True)
            continue
        cosine = naive_cosine(query, queries[t - 1 if config.compare == "previous" else last])
        margin = min(margin, abs(cosine - config.threshold))
        flags.append(cosine < config.threshold or (config.max_stride is not None and t - last >= config.max_stride))
        last = t if flags[-1] else last
    return flags, margin


def test_every_step_fires_at_every_step() -> None:
    assert run(EveryStep(), [0.0] * 6) == list(range(6))


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_fixed_stride_fires_first_and_then_at_every_nth_step_whatever_the_query(steps: int) -> None:
    assert run(FixedStride(steps), [0.0, 170.0, 3.0, 90.0] * 4) == list(range(0, 16, steps))


@examples(30)
@given(seed=SEEDS)
def test_mean_cosine_is_that_of_plain_python(seed: int) -> None:
    queries, reference = gaussian(seed, 5, 8), gaussian(seed + 1, 5, 8)
    assert float(mean_cosine(queries, reference)) == pytest.approx(naive_cosine(queries.tolist(), reference.tolist()), abs=1e-6)


def test_heads_count_alike_whatever_their_lengths() -> None:
    reference, query = torch.eye(4), torch.eye(4)
    query[3] = torch.tensor([0.0, 0.0, 1000.0, 0.0])  # one head of four turns by 90 degrees, with a long query
    assert float(mean_cosine(query, reference)) == 0.75
    for threshold, fires in [(0.74, False), (0.76, True)]:
        trigger = SemanticBoundary(threshold).build(1)
        trigger.fires(reference.unsqueeze(0), [0])
        assert trigger.fires(query.unsqueeze(0), [0]) == [fires]


def test_a_zero_query_is_finite_and_a_turn() -> None:
    trigger = SemanticBoundary(0.5).build(1)
    assert [trigger.fires(q, [0]) for q in (torch.ones(1, 2, 4), torch.zeros(1, 2, 4), torch.ones(1, 2, 4))] == [[True]] * 3


@examples(60)
@given(
    seed=SEEDS, threshold=st.sampled_from([-0.5, 0.0, 0.5, 0.9]), compare=st.sampled_from(["previous", "retrieval"]),
    stride=st.sampled_from([None, 1, 2, 5]),
)  # fmt: skip
def test_a_boundary_is_where_naive_code_sees_one(seed: int, threshold: float, compare: str, stride: int | None) -> None:
    config = SemanticBoundary(threshold, compare, stride)  # type: ignore[arg-type]
    queries = wandering(seed, 16, 2)
    trigger = config.build(2)
    flags = [trigger.fires(q, [0, 1]) for q in queries]
    for b in range(2):
        expected, margin = naive_fires(config, queries[:, b].tolist())
        if margin > 1e-5:
            assert [f[b] for f in flags] == expected


def test_a_slow_drift_is_noticed_against_the_last_search_only() -> None:
    drift = [5.0 * step for step in range(20)]  # cos 25 degrees > 0.9 > cos 30 degrees
    assert run(SemanticBoundary(0.9), drift) == [0]
    assert run(SemanticBoundary(0.9, "retrieval"), drift) == [0, 6, 12, 18]


def test_a_turn_there_and_back_is_two_boundaries_before_and_after() -> None:
    angles = [0.0, 0.0, 90.0, 0.0, 0.0]
    assert run(SemanticBoundary(0.9), angles) == [0, 2, 3]
    assert run(SemanticBoundary(0.9, "retrieval"), angles) == [0, 2, 3]


def test_a_cosine_at_the_threshold_is_no_boundary() -> None:
    assert run(SemanticBoundary(1.0), [0.0, 0.0, 0.0]) == [0]
    assert run(SemanticBoundary(-1.0), [0.0, 180.0, 0.0]) == [0]


@pytest.mark.parametrize("compare", ["previous", "retrieval"])
def test_max_stride_counts_from_the_last_step_that_fired(compare: str) -> None:
    config = SemanticBoundary(0.5, compare, max_stride=4)  # type: ignore[arg-type]
    assert run(config, [0.0] * 10) == [0, 4, 8]
    assert run(config, [0.0] * 3 + [90.0] * 8) == [0, 3, 7]
    assert run(SemanticBoundary(0.5, compare, max_stride=1), [0.0] * 4) == [0, 1, 2, 3]  # type: ignore[arg-type]


def test_half_precision_queries_are_compared_in_fp32() -> None:
    queries = wandering(3, 12, 1).half()
    trigger = SemanticBoundary(0.6).build(1)
    expected, margin = naive_fires(SemanticBoundary(0.6), queries[:, 0].tolist())
    assert margin > 1e-5 and [trigger.fires(q, [0])[0] for q in queries] == expected


def test_the_reference_is_a_copy_of_the_query() -> None:
    trigger, query = SemanticBoundary(0.5).build(1), torch.ones(1, 2, 4)
    trigger.fires(query, [0])
    query.neg_()  # a caller may reuse its buffer
    assert trigger.fires(torch.ones(1, 2, 4), [0]) == [False]


@each_config
@examples(20)
@given(seed=SEEDS)
def test_a_sequence_fires_as_it_would_alone(config: Config, seed: int) -> None:
    queries, together = wandering(seed, 12, 3), config.build(3)
    alone = [config.build(1) for _ in range(3)]
    present = torch.rand(12, 3, generator=torch.Generator().manual_seed(seed)) < 0.7
    for t in range(12):
        some = [b for b in (2, 0, 1) if present[t, b]]  # some sit out, and the order is the caller's
        assert together.fires(queries[t][some], some) == [alone[b].fires(queries[t, b : b + 1], [0])[0] for b in some]


@each_config
def test_forget_makes_the_next_step_fire_as_if_it_were_the_first(config: Config) -> None:
    queries = wandering(1, 20, 2)
    trigger, other, fresh = config.build(2), config.build(1), config.build(1)
    for t in range(8):
        trigger.fires(queries[t], [0, 1])
        other.fires(queries[t, 1:], [0])
    trigger.forget(0)
    for t in range(8, 20):
        flags = trigger.fires(queries[t], [0, 1])
        assert flags == [fresh.fires(queries[t, :1], [0])[0], other.fires(queries[t, 1:], [0])[0]]
        assert flags[0] or t > 8


@each_config
def test_a_selected_trigger_goes_on_alike_and_shares_nothing(config: Config) -> None:
    queries = wandering(2, 24, 2)
    trigger, twin = config.build(2), config.build(2)
    for t in range(5):
        trigger.fires(queries[t], [0, 1])
        twin.fires(queries[t], [0, 1])
    chosen = trigger.select([1, 0, 1])
    for t in range(5, 12):  # the original goes another way first, and forgets
        trigger.fires(-queries[t], [0, 1])
    trigger.forget(0)
    for t in range(12, 24):
        flags: list[bool] = twin.fires(queries[t], [0, 1])
        assert chosen.fires(queries[t][[1, 0, 1]], [0, 1, 2]) == [flags[1], flags[0], flags[1]]


@each_config
def test_a_selection_does_not_change_its_origin(config: Config) -> None:
    queries = wandering(4, 16, 1)
    trigger, twin = config.build(1), config.build(1)
    kept: Trigger = trigger
    for t in range(16):
        copy = kept.select([0])
        copy.fires(gaussian(t, 1, 3, 8), [0])
        copy.forget(0)
        assert trigger.fires(queries[t], [0]) == twin.fires(queries[t], [0])


@pytest.mark.parametrize("steps", [0, -1, 1.5, "4", None])
def test_impossible_strides_are_refused(steps: object) -> None:
    with pytest.raises(ParameterError, match="steps"):
        FixedStride(steps)  # type: ignore[arg-type]
    if steps is not None:
        with pytest.raises(ParameterError, match="max_stride"):
            SemanticBoundary(max_stride=steps)  # type: ignore[arg-type]


@pytest.mark.parametrize("threshold", [1.01, -1.5, float("nan"), "0.8", None])
def test_thresholds_that_are_no_cosines_are_refused(threshold: object) -> None:
    with pytest.raises(ParameterError, match="threshold"):
        SemanticBoundary(threshold)  # type: ignore[arg-type]


def test_an_unknown_reference_query_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UnknownNameError, match=r"previous.*retrieval"):
        SemanticBoundary(compare="first")  # type: ignore[arg-type]


def test_who_marks_segments() -> None:
    assert [c.marks_segments for c in (EveryStep(), FixedStride(), SemanticBoundary())] == [False, True, True]

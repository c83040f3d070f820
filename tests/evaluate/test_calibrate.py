"""The threshold that is found gives the wanted stride on the text it was found on."""

from __future__ import annotations

import pytest
import torch

import kvrecall
from kvrecall.core.errors import ParameterError
from kvrecall.evaluate.plan import Plan
from kvrecall.evaluate.suite import Suite
from kvrecall.evaluate.tune import calibrate, searches, watch_answers, watch_queries
from kvrecall.trigger import SemanticBoundary
from tests.backends.models import tiny
from tests.evaluate.asked import asker, compared
from tests.strategies import gaussian


def walk(seed: int, steps: int = 400, heads: int = 4) -> torch.Tensor:
    """Queries that drift and now and then jump."""
    moves = gaussian(seed, steps, heads, 32) * torch.rand(steps, 1, 1, generator=torch.Generator().manual_seed(seed))
    return gaussian(seed + 1, 1, heads, 32) + moves


@pytest.mark.parametrize("stride", [1, 2.5, 5, 16])
@pytest.mark.parametrize("compare", ["previous", "retrieval"])
def test_threshold_gives_the_wanted_stride_and_a_lower_one_does_not(stride: float, compare: str) -> None:
    queries = {n: walk(n) for n in range(2, 5)}
    trigger = SemanticBoundary(compare=compare)  # type: ignore[arg-type]
    found = calibrate(queries, stride, trigger)
    assert found.stride <= stride and set(found.layers) == {2, 3, 4}
    assert isinstance(found.threshold, float)
    below = SemanticBoundary(found.threshold - 0.001, compare=compare)  # type: ignore[arg-type]
    assert 1200 / sum(searches(q, below) for q in queries.values()) > stride
    total = sum(400 / s for s in found.layers.values())
    assert found.stride == pytest.approx(1200 / total)


def test_counted_searches_are_those_of_the_trigger() -> None:
    queries = walk(7)
    for trigger in (SemanticBoundary(0.6), SemanticBoundary(0.6, max_stride=4), SemanticBoundary(0.6, compare="retrieval")):
        state = trigger.build(1)
        assert searches(queries, trigger) == sum(state.fires(q[None], [0])[0] for q in queries)


def test_every_layer_can_have_its_own_threshold() -> None:
    queries = {1: walk(3), 3: 2 * walk(5) + gaussian(9, 400, 4, 32), 4: walk(7) + 3}
    found = calibrate(queries, 5, dense_layers=(), per_layer=True)
    assert isinstance(found.threshold, tuple) and len(found.threshold) == 5 and found.threshold[:3:2] == (0.0, 0.0)
    assert all(4 < stride <= 5 for stride in found.layers.values())
    shared = calibrate(queries, 5, dense_layers=())
    assert max(shared.layers.values()) > 2 * min(shared.layers.values())
    method = kvrecall.LouisKV(threshold=found.threshold)
    assert [method.trigger_config().at(n) for n in queries] == [found.threshold[n] for n in queries]  # type: ignore[union-attr]
    with pytest.raises(ParameterError, match="layer 5"):
        method.build_trigger(1, 5)


def test_dense_layers_do_not_count() -> None:
    quiet = {0: gaussian(0, 1, 4, 32).expand(100, 4, 32), 1: gaussian(1, 100, 4, 32)}
    assert calibrate(quiet, 2, dense_layers=(0,)).layers.keys() == {1}
    with pytest.raises(ParameterError, match="layer that is not dense"):
        calibrate(quiet, 2)
    with pytest.raises(ParameterError, match=r"steps in \[1, 100\]"):
        calibrate(quiet, 101, dense_layers=())


def test_queries_of_a_model_are_watched_in_order() -> None:
    model = tiny("llama")
    ids = torch.randint(3, 320, (1, 50), generator=torch.Generator().manual_seed(0))
    pieces, whole = (watch_queries(model, ids, chunk_tokens=c) for c in (7, 50))
    assert set(pieces) == {0, 1, 2} and pieces[1].shape == (50, 4, 64)
    torch.testing.assert_close(pieces[1], whole[1], atol=1e-5, rtol=1e-5)


def test_every_sequence_begins_with_a_search() -> None:
    """Where one ends and the next begins nothing is compared."""
    parts = [walk(seed, 40) for seed in (3, 5, 7)]
    found = calibrate({2: parts}, 5)
    trigger = SemanticBoundary(found.threshold)
    assert found.layers == {2: 120 / sum(searches(part, trigger) for part in parts)} and found.stride <= 5
    with pytest.raises(ParameterError, match=r"steps in \[1, 40\]"):
        calibrate({2: parts}, 41)


def test_queries_of_answers_are_those_of_their_decode_steps() -> None:
    plan = Plan(("json-kv:2", "multi-turn:2"), (400,), samples=1, seed=1)
    answering, told = asker(), []
    queries = watch_answers(answering, plan, on_progress=lambda *done: told.append(done))
    assert told == [(0, 2), (1, 2), (2, 2)] and set(queries) == {0, 1}
    assert len(queries[0]) == 3  # a look-up and two turns
    records = [r for job in Suite(plan, answering, compared(8)[:1]).samples()
               for r in Suite(plan, answering, compared(8)[:1]).answer((job,), compared(8)[:1])]  # fmt: skip
    # The first token of an answer comes from the question's last one, the last is written and not read.
    assert sum(map(len, queries[0])) == sum(r["new_tokens"] for r in records) - 3
    assert queries[1][0].shape[1:] == (2, 64)

"""The advisor meets the mass on its text, at little cost, and its file makes the same method."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch

import kvrecall
from kvrecall.core.errors import ParameterError
from kvrecall.evaluate.recall import replay
from kvrecall.evaluate.trace import LayerTrace, Trace, TraceInfo
from kvrecall.evaluate.tune import Option, choose, tune
from kvrecall.methods.files import load_method, save_method
from tests.one_layer import ZONES, normal

TOKENS, STEPS = 300, 3


def trace() -> Trace:
    """Three layers: attention that is sharp, that is flat, and in between."""
    layers = {}
    for number, sharpness in enumerate((6.0, 0.5, 2.0)):
        keys = normal(2, TOKENS + STEPS, 64, seed=10 + number)
        queries = normal(STEPS, 4, 64, seed=20 + number) * sharpness
        seen = normal(4, 40, 64, seed=40 + number)
        layers[number] = LayerTrace(keys, normal(2, TOKENS + STEPS, 64, seed=30 + number), queries, seen)
    return Trace(TraceInfo("random", TOKENS, STEPS, 0.125, tuple(layers)), layers)


@pytest.mark.parametrize("name", ["exact", "pariskv"])
@pytest.mark.parametrize("mass", [0.6, 0.9])
def test_the_mass_is_met_on_the_text_for_less_than_one_budget_for_all(tmp_path: Path, name: str, mass: float) -> None:
    method = kvrecall.methods.get(name, **ZONES)
    found = tune(trace(), method, mass)
    assert mass <= found.mass <= 1
    save_method(found.method, tmp_path / "m.json", layers=3)
    read = load_method(tmp_path / "m.json", 3)
    assert read == found.method
    reports = replay(trace(), read)
    assert reports[-1].mass == found.mass >= mass
    assert [round(r.mass, 4) for r in reports[:-1]] == [layer.mass for layer in found.layers]
    assert found.step_bytes < found.full_bytes
    assert found.uniform_bytes is not None and found.step_bytes <= 1.01 * found.uniform_bytes
    sharp, flat, _ = found.layers
    assert sum(sharp.head_tokens) < sum(flat.head_tokens)
    assert all(layer.mass >= 0.8 * mass for layer in found.layers)
    narrow = tune(trace(), method, mass, floor=0.0)
    assert mass <= narrow.mass and narrow.step_bytes <= found.step_bytes
    assert min(layer.mass for layer in tune(trace(), method, mass, floor=mass).layers) >= mass - 1e-4


def test_heads_need_what_a_hand_count_says() -> None:
    recorded = trace()
    needs = tune(recorded, kvrecall.Exact(**ZONES), 0.8).layers[2].head_tokens
    layer, counted = recorded.layers[2], []
    for step, query in enumerate(layer.queries):
        share = torch.softmax(layer.keys[0, : TOKENS + step + 1] @ query[1] * 0.125, -1)
        zone = share[4 : TOKENS - 16].sort(descending=True).values
        caught, tokens = float(1 - zone.sum()), 0
        while caught < 0.8:
            caught, tokens = caught + float(zone[tokens]), tokens + 1
        counted.append(tokens)
    assert needs[1] == pytest.approx(sum(counted) / STEPS, abs=0.4)


def test_everything_asked_for_is_dense_and_dense_layers_stay_so() -> None:
    whole = tune(trace(), kvrecall.Exact(**ZONES), 1.0)
    assert whole.method.dense_layers == (0, 1, 2) and whole.mass == pytest.approx(1) and whole.step_bytes == whole.full_bytes
    kept = tune(trace(), kvrecall.Exact(**ZONES, dense_layers=(0,)), 0.5)
    assert kept.method.dense_layers[0] == 0 and kept.layers[0].settings is None


def test_louiskv_gets_thresholds_for_the_stride() -> None:
    method = kvrecall.LouisKV(**{**ZONES, "dense_layers": (0,)}, cluster_tokens=4, stretch_tokens=32, max_segment_tokens=8)
    found = tune(trace(), method, 0.5, stride=2).method
    assert isinstance(found, kvrecall.LouisKV) and isinstance(found.threshold, tuple) and found.threshold[0] == 0
    with pytest.raises(ParameterError, match="a method with a similarity threshold"):
        tune(trace(), kvrecall.Exact(**ZONES), 0.5, stride=2)


@pytest.mark.parametrize("mass", [0.3, 0.6, 0.8, 0.95, 1.0])
def test_the_choice_meets_the_mass_at_the_least_cost(mass: float) -> None:
    sizes = ((0.4, 1), (0.7, 2), (0.9, 6)), ((0.1, 1), (0.2, 2), (0.8, 9)), ((0.6, 1), (0.65, 3), (0.7, 5))
    options = {n: [Option(None, 1.0, 20.0), *(Option((("top_k", c),), m, c) for m, c in each)] for n, each in enumerate(sizes)}
    chosen = choose(options, mass)
    assert sum(o.mass for o in chosen.values()) >= 3 * mass - 1e-9
    costs = [sum(o.step_bytes for o in c) for c in product(*options.values()) if sum(o.mass for o in c) >= 3 * mass - 1e-9]
    assert sum(o.step_bytes for o in chosen.values()) == min(costs)


def test_methods_and_masses_that_cannot_be() -> None:
    with pytest.raises(ParameterError, match=r"floor: expected a share in \[0, 0.5\]"):
        tune(trace(), kvrecall.Exact(**ZONES), 0.5, floor=0.6)
    with pytest.raises(ParameterError, match="one that retrieves"):
        tune(trace(), kvrecall.Full(**ZONES), 0.9)
    for mass in (0, 1.1):
        with pytest.raises(ParameterError, match=r"a share in \(0, 1\]"):
            tune(trace(), kvrecall.Exact(**ZONES), mass)

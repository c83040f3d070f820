"""Rows and queries of a traced model for layers of another shape."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.inputs import NOISE, Gaussian, Traced, Turning
from kvrecall.backends.transformers.families import ModelSignature
from kvrecall.core.errors import InputFileError, ParameterError
from kvrecall.evaluate.trace import LayerTrace, Trace, TraceInfo

PROMPT, STEPS, WINDOW = 40, 3, 5
MADE = ModelSignature("llama", 4, 8, 2, 64)
"""4 layers, groups of four query heads, two KV heads."""


def numbered(*shape: int) -> torch.Tensor:
    return torch.arange(float(torch.tensor(shape).prod())).view(shape) / 1000


@pytest.fixture(scope="module")
def trace() -> Trace:
    """Three layers of three KV heads, groups of two."""
    layers = {}
    for n in (0, 7, 9):
        layers[n] = LayerTrace(
            n + numbered(3, PROMPT + STEPS, 64), -n - numbered(3, PROMPT + STEPS, 64), n + numbered(STEPS, 6, 64),
            n + numbered(6, WINDOW, 64),
        )  # fmt: skip
    return Trace(TraceInfo("m", PROMPT, STEPS, 0.125, (0, 7, 9)), layers)


def source(trace: Trace) -> Traced:
    return Traced(MADE, trace, "cpu", torch.float32)


def test_heads_of_all_layers_and_sequences_take_those_of_the_trace_in_turn(trace: Trace) -> None:
    expected = [(n, h) for n in (0, 7, 9) for h in range(3)]
    for number in range(16):
        b, (layer, head) = number // 8, divmod(number % 8, 2)
        keys, values = source(trace).rows(layer, b, PROMPT)
        n, h = expected[number % 9]
        assert torch.equal(keys[head], trace.layers[n].keys[h, :PROMPT])
        assert torch.equal(values[head], trace.layers[n].values[h, :PROMPT])


def test_short_prompts_are_its_end_and_long_ones_end_with_it(trace: Trace) -> None:
    keys, _ = source(trace).rows(0, 0, 15)
    assert torch.equal(keys[1], trace.layers[0].keys[1, PROMPT - 15 : PROMPT])
    keys, values = source(trace).rows(1, 0, 2 * PROMPT + 7)  # heads 2 of layer 0 and 0 of layer 7
    own = trace.layers[7]
    assert torch.equal(keys[1, -PROMPT:], own.keys[0, :PROMPT])
    assert torch.equal(values[1], torch.cat([own.values[0, PROMPT - 7 : PROMPT], *2 * [own.values[0, :PROMPT]]]))
    apart = keys[1, 7 : 7 + PROMPT] - own.keys[0, :PROMPT]
    assert (apart != 0).all()
    assert float(apart.std() / keys[1].std()) == pytest.approx(NOISE, rel=0.1)


def test_queries_are_those_of_the_group_step_by_step(trace: Trace) -> None:
    traced = source(trace)
    found = traced.queries(4, 2)
    assert found.shape == (4, 2, 8, 1, 64)
    for step in (0, 1, 2, 0):
        # Layer 2 of sequence 0: heads 4 and 5 of the trace, which are 1 and 2 of layer 7; their groups of two serve four.
        theirs = trace.layers[7].queries[step]
        assert torch.equal(found[2, 0, :, 0], theirs[[2, 3, 2, 3, 4, 5, 4, 5]])
        traced.move(found)
    asked = traced.asked(2, 0, 7)
    assert torch.equal(asked[0], trace.layers[7].prompt_queries[2, [3, 4, 0, 1, 2, 3, 4]])


def test_what_does_not_fit_is_said(trace: Trace, tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match="expected heads of 128 numbers, got 64"):
        Traced(ModelSignature("llama", 4, 8, 2, 128), trace, "cpu")
    with pytest.raises(ParameterError, match="expected decode steps and queries of the prompt, got '0 and 5'"):
        Traced(MADE, Trace(TraceInfo("m", PROMPT, 0, 0.125, (0, 7, 9)), trace.layers), "cpu")
    unseen = {n: replace(x, prompt_queries=x.prompt_queries[:, :0]) for n, x in trace.layers.items()}
    with pytest.raises(ParameterError, match="got '3 and 0'"):
        Traced(MADE, Trace(trace.info, unseen), "cpu")
    (tmp_path / "x").write_text("no")
    with pytest.raises(InputFileError, match="not a trace"):
        Trace.load(tmp_path / "x")


def test_without_a_trace_numbers_are_normal() -> None:
    plain, turning = Gaussian(MADE, "cpu"), Turning(MADE, "cpu")
    keys, values = plain.rows(0, 0, 500)
    assert keys.shape == values.shape == (2, 500, 64) and keys.dtype == torch.bfloat16 and not torch.equal(keys, values)
    assert abs(float(keys.float().std()) - 1) < 0.05 and plain.asked(0, 0, 3).shape == (8, 3, 64)
    before = turning.queries(4, 2)
    after = before.clone()
    turning.move(after)
    assert torch.cosine_similarity(before.float(), after.float(), -1).mean() == pytest.approx(0.93, abs=0.02)

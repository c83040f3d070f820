"""Layers that were given what is not finite are told in the log, once each time, a few passes later."""

from __future__ import annotations

import logging

import pytest
import torch

from kvrecall.step.finite import PASSES, FiniteWatch


def passes(watch: FiniteWatch, count: int) -> list[int]:
    return [number for _ in range(count) for number in watch.look()]


def test_layers_are_named_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    watch, flags = FiniteWatch(), {number: torch.zeros(4, dtype=torch.int32) for number in (7, 3, 5)}
    for number, own in flags.items():
        watch.add(number, own)
    with caplog.at_level(logging.ERROR, "vllm.kvrecall"):
        assert passes(watch, 3 * PASSES) == [] and not caplog.records
        flags[7][3] = flags[3][0] = 1
        assert passes(watch, 2 * PASSES) == [3, 7]
        assert "first in layer 3 (of 2 layers)" in caplog.text and "--dtype bfloat16" in caplog.text
        assert passes(watch, 3 * PASSES) == [] and len(caplog.records) == 1
        flags[5][0] = 1
        assert passes(watch, 2 * PASSES) == [5]


def test_an_engine_without_kernels_has_nothing_to_look_at() -> None:
    assert passes(FiniteWatch(), 2 * PASSES) == []

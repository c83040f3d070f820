"""Keys that come after what an index was fitted to: found alike where nothing is fitted, counted apart where they are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from scripts import recall_long

from kvrecall.evaluate.trace import LayerTrace, Trace, TraceInfo
from tests.strategies import gaussian


@pytest.fixture(scope="module", params=[8, 300], ids=["a prompt", "a prompt and what was decoded"])
def trace(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Keys of two heads whose last third lies elsewhere, and along other directions."""
    steps, tokens = request.param, 1800
    spread = torch.linspace(0.2, 3, 64)
    keys = gaussian(0, 2, tokens, 64) * spread
    keys[:, 1200:] = gaussian(1, 2, tokens - 1200, 64) * spread.flip(0) + 1
    layer = LayerTrace(keys, gaussian(2, 2, tokens, 64), gaussian(3, steps, 4, 64), torch.empty(4, 0, 64))
    path = tmp_path_factory.mktemp("traces") / "7.safetensors"
    Trace(TraceInfo("random", tokens - steps, steps, 0.125, (3,)), {3: layer}).save(path)
    return path


def test_without_maps_the_first_part_decides_nothing(trace: Path) -> None:
    for name in ("group: exact, k 100", "group: product, beta 5 %, k 100"):
        found = recall_long.late_row(trace, name, "cpu", 0.75)
        assert found["late_recall"] == found["late_recall_all_fitted"] and found["recall"] == found["recall_all_fitted"]
        assert set(found) == set(recall_long.LATE_COLUMNS)


def test_maps_of_the_first_part_are_not_those_of_everything(trace: Path) -> None:
    decoded = Trace.load(trace).info.steps == 300
    found = recall_long.late_row(trace, "each head: balanced, beta 5 %, k 100", "cpu", 2 / 3)
    assert (
        found["fitted_tokens"] == (1500 if decoded else 1194)
        and found["sample"] == "7"
        and found["steps"] == (16 if decoded else 8)
    )
    shares = [found[name] for name in recall_long.LATE_COLUMNS[-5:]]
    assert all(0 < share < 1 for share in shares)  # type: ignore[operator]
    assert found["late_recall"] != found["late_recall_all_fitted"]
    if not decoded:
        assert found["late_recall"] < found["late_recall_all_fitted"]  # type: ignore[operator]

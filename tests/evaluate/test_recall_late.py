"""Keys that come after an index's prompt: found as the prompt's are, and counted apart."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from scripts import recall_long

from kvrecall import Exact
from kvrecall.evaluate.trace import LayerTrace, Trace, TraceInfo
from tests.index.sphere.build import own_statistics
from tests.strategies import gaussian


@pytest.fixture(scope="module", params=[8, 300], ids=["a prompt", "a prompt and what was decoded"])
def trace(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Keys of two heads whose last third lies elsewhere, and along other directions."""
    steps, tokens = request.param, 1800
    spread = torch.linspace(0.2, 3, 64)
    keys = gaussian(0, 2, tokens, 64) * spread
    keys[:, 1200:] = gaussian(1, 2, tokens - 1200, 64) * spread.flip(0) + 1
    layer = LayerTrace(keys, gaussian(2, 2, tokens, 64), gaussian(3, steps, 4, 64), torch.empty(4, 0, 64), own_statistics(keys))
    path = tmp_path_factory.mktemp("traces") / "7.safetensors"
    Trace(TraceInfo("random", tokens - steps, steps, 0.125, (3,)), {3: layer}).save(path)
    return path


def test_where_a_prompt_ends_decides_nothing(trace: Path) -> None:
    """Codes are the same whether a key came with the prompt or was generated; only which ones count as late changes."""
    decoded = Trace.load(trace).info.steps == 300
    for name in ("group: exact, k 100", "group: product, beta 5 %, k 100"):
        found = [recall_long.late_row(trace, name, "cpu", share) for share in (0.5, 0.75)]
        assert all(set(row) == set(recall_long.LATE_COLUMNS) for row in found)
        assert found[0]["recall"] == found[1]["recall"]
        assert (found[0]["late_share"] == found[1]["late_share"]) == decoded


def test_late_keys_are_counted_apart(trace: Path) -> None:
    decoded = Trace.load(trace).info.steps == 300
    found = recall_long.late_row(trace, "each head: balanced, beta 5 %, k 100", "cpu", 2 / 3)
    assert found["first_tokens"] == (1500 if decoded else 1194) and found["sample"] == "7"
    assert found["steps"] == (16 if decoded else 8) and found["tokens"] == (1784 if decoded else 1792)
    shares = [found[name] for name in recall_long.LATE_COLUMNS[-3:]]
    assert all(0 < share < 1 for share in shares)  # type: ignore[operator]


def test_all_that_is_late_is_found_where_everything_is(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head's own true top-100, searched by the head alone."""
    monkeypatch.setitem(recall_long.LATE_MODES, "each head: exact", lambda: Exact(top_k=100, sink_tokens=64, local_tokens=256))
    found = recall_long.late_row(trace, "each head: exact", "cpu", 0.75)
    assert found["late_recall"] == found["recall"] == 1

"""What balanced keys find by the number of their candidates."""

from __future__ import annotations

from pathlib import Path

import torch
from scripts import recall_beta

from kvrecall.evaluate.trace import LayerTrace, Trace, TraceInfo
from tests.index.sphere.build import own_statistics
from tests.strategies import gaussian


def test_variants_rerank_more_than_is_fetched() -> None:
    found = list(recall_beta.variants(2000, 100))
    assert found == [(1.0, 1), (0.5, 1), (0.25, 1), (0.2, 1), (0.1, 1), (0.06, 1), (None, 2), (None, 4), (None, 8), (None, 16)]
    assert list(recall_beta.variants(150, 100)) == [(1.0, 1)]


def test_more_candidates_hold_more_of_the_truth(tmp_path: Path) -> None:
    keys, queries = gaussian(0, 2, 1000, 64), gaussian(3, 3, 4, 64)
    layer = LayerTrace(keys, gaussian(2, 2, 1000, 64), queries, torch.empty(4, 0, 64), own_statistics(keys))
    Trace(TraceInfo("random", 997, 3, 0.125, (3,)), {3: layer}).save(tmp_path / "7.safetensors")
    rows = list(recall_beta.rows(tmp_path / "7.safetensors", 20))
    assert all(set(row) == set(recall_beta.COLUMNS) for row in rows)
    assert {(row["sample"], row["tokens"], row["zone"], row["top_k"], row["steps"]) for row in rows} == {("7", 997, 677, 20, 3)}
    shares = {row["beta"]: row for row in rows if row["beta"] != ""}
    assert [shares[share]["candidates"] for share in (1.0, 0.5, 0.1)] == [677, 339, 68]
    assert {row["per_k"]: row["candidates"] for row in rows if row["per_k"] != ""} == {2: 40, 4: 80, 8: 160, 16: 320}
    kept = [row["coarse_recall"] for row in sorted(rows, key=lambda row: -int(str(row["candidates"])))]
    assert kept == sorted(kept, key=lambda share: -float(str(share))) and kept[0] == 1
    assert all(row["mass"] <= row["exact_mass"] for row in rows)  # type: ignore[operator]

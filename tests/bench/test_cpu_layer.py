"""The benchmark measures what it says, writes what it measures, and refuses to time a wrong result."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch

from kvrecall.bench import cpu_layer
from kvrecall.bench.rows import write_csv


def test_a_row_holds_both_sides_and_their_ratio(tmp_path: Path) -> None:
    row = cpu_layer.measure("smollm2", 4096, torch.float32, seconds=0.02)
    assert row.speedup == pytest.approx(min(row.sdpa_gqa_p50_ms, row.sdpa_folded_p50_ms) / row.retrieval_p50_ms)
    assert row.retrieval_p20_ms <= row.retrieval_p50_ms <= row.retrieval_p80_ms
    assert row.dense_bytes == 2 * 4096 * 3 * 64 * 4
    assert 64 + 256 + 100 < row.attended_tokens < 64 + 256 + 512 + 100
    write_csv(tmp_path / "rows.csv", [row])
    (line,) = csv.DictReader((tmp_path / "rows.csv").open())
    assert line["shape"] == "smollm2" and line["torch"] == torch.__version__ and float(line["retrieval_p50_ms"]) > 0


def test_a_wrong_result_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = cpu_layer.decode_step
    monkeypatch.setattr(cpu_layer, "decode_step", lambda *a: right(*a) * 1.1)
    with pytest.raises(AssertionError):
        cpu_layer.measure("smollm2", 4096, torch.float32, seconds=0.02)

"""The benchmark measures what it says, writes what it measures, and refuses to time a wrong result."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch

from benchmarks import cpu_layer
from benchmarks.rows import write_csv


def test_a_row_holds_both_sides_and_their_ratio(tmp_path: Path) -> None:
    row = cpu_layer.measure("smollm2", 4096, torch.float32, seconds=0.02)
    assert row.speedup == pytest.approx(min(row.sdpa_gqa_p50_ms, row.sdpa_folded_p50_ms) / row.retrieval_p50_ms)
    assert row.retrieval_p20_ms <= row.retrieval_p50_ms <= row.retrieval_p80_ms
    assert row.dense_bytes == 2 * 4096 * 3 * 64 * 4
    assert 64 + 256 + 100 < row.attended_tokens < 64 + 256 + 512 + 100
    write_csv(tmp_path / "rows.csv", [row])
    (line,) = csv.DictReader((tmp_path / "rows.csv").open())
    assert line["shape"] == "smollm2" and line["torch"] == torch.__version__ and float(line["retrieval_p50_ms"]) > 0


@pytest.mark.parametrize("name", cpu_layer.methods())
def test_every_method_is_measured_on_what_it_attends(name: str) -> None:
    row = cpu_layer.measure("smollm2", 4096, torch.bfloat16, seconds=0.02, name=name)
    method = cpu_layer.methods()[name]
    zones = method.zone_sizes()
    assert method.top_k is not None
    resident = zones.sink_tokens + zones.local_tokens
    assert resident + method.top_k <= row.attended_tokens <= resident + zones.update_interval + method.top_k
    assert row.method == name and row.build_seconds > 0
    assert row.retrieval_bytes >= int(3 * row.attended_tokens * 2 * 64 * 2)


def test_a_wrong_result_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = cpu_layer.decode_step
    monkeypatch.setattr(cpu_layer, "decode_step", lambda *a: right(*a) * 1.1)
    with pytest.raises(AssertionError):
        cpu_layer.measure("smollm2", 4096, torch.float32, seconds=0.02)

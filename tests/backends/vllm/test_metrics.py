"""Counts of all ranks of an engine, told from threads of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("prometheus_client", reason="vLLM has an environment of its own: make test-vllm")

from kvrecall.backends.vllm import metrics
from kvrecall.step.counts import Counts

COUNTS = Counts(searches=3, searched_tokens=900, selected_rows=60, fetched_rows=40, fetched_bytes=40960)


def settles(folder: Path, expected: dict[str, dict[str, int]]) -> bool:
    until = time.monotonic() + 10
    while time.monotonic() < until:
        if metrics.by_engine(folder) == expected:
            return True
        time.sleep(0.01)
    return False


def test_ranks_are_added_and_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, device = tmp_path / "counts", torch.device("cpu")
    monkeypatch.setenv("KVRECALL_VLLM_COUNTS", str(folder))
    monkeypatch.setattr(metrics, "_SECONDS", 0.01)
    counted = [COUNTS, COUNTS, replace(COUNTS, searches=5)]
    writers = [
        metrics.CounterWriter(lambda n=n: counted[n], *place, device) for n, place in enumerate([(0, 0), (0, 1), (1, 0)])
    ]
    both = {"searches": 3, "searched_tokens": 900, "selected_rows": 120, "fetched_rows": 80, "fetched_bytes": 81920}
    other = asdict(counted[2])
    assert settles(folder, {"0": both, "1": other})
    names = {family.name: {s.labels["engine"]: s.value for s in family.samples} for family in metrics._Counted().collect()}
    assert names["kvrecall:searches"] == {"0": 3, "1": 5} and names["kvrecall:fetched_bytes"]["0"] == 81920
    time.sleep(0.1)
    counted[2] = replace(counted[2], searches=9)
    writers[2].passed()
    assert settles(folder, {"0": both, "1": other | {"searches": 9}})
    for teller in writers:
        teller.close()
    assert not folder.exists()


def test_every_api_server_tells_each_counter_once(tmp_path: Path) -> None:
    """With several of them, vLLM shows the registry of prometheus' multiprocess mode, which knows files alone."""
    folder, shared = tmp_path / "counts", tmp_path / "prometheus"
    folder.mkdir()
    shared.mkdir()
    (folder / "0-0.json").write_text(json.dumps(asdict(COUNTS)))
    code = """
from prometheus_client import CollectorRegistry, generate_latest, multiprocess
from kvrecall.backends.vllm import metrics
metrics.register()
metrics.register()
registry = CollectorRegistry()
multiprocess.MultiProcessCollector(registry)
print(generate_latest(registry).decode())
"""
    told = os.environ | {"KVRECALL_VLLM_COUNTS": str(folder), "PROMETHEUS_MULTIPROC_DIR": str(shared)}
    servers = [subprocess.run([sys.executable, "-c", code], env=told, check=True, capture_output=True, text=True) for _ in "12"]
    for server in servers:
        assert server.stdout.count('kvrecall:searches_total{engine="0"} 3.0') == 1
        assert server.stdout.count('kvrecall:fetched_rows_total{engine="0"} 40.0') == 1


def test_vllm_starts_without_compilers() -> None:
    """vLLM's CPU workers look through all modules for kernels, and fail at what some compilers keep in theirs."""
    code = "import sys, kvrecall.backends.vllm.metrics; sys.exit('numba' in sys.modules or 'llvmlite' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_server_without_workers_has_no_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVRECALL_VLLM_COUNTS", str(tmp_path / "none"))
    assert all(not family.samples for family in metrics._Counted().collect())

"""What rows are compared with: bandwidths, bytes that must be moved, versions; and that wrong work is not timed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from math import isnan, nan
from pathlib import Path
from typing import Any

import pytest
import torch
from scripts.tables.bench.rows import FOLDER, Table

from benchmarks import byte_counts, gpu_layer, gpu_methods, gpu_ops, rows
from benchmarks.bandwidth import Bandwidths, Traffic, best, bus_traffic, device_traffic
from benchmarks.byte_counts import Heads, Moved
from benchmarks.checks import CheckError, require
from benchmarks.gpu_time import percentiles
from benchmarks.models import CONFIGS, SHAPES

EIGHT_B = Heads(32, 8, 128)


def test_the_best_bandwidth_is_taken() -> None:
    def copy() -> None: ...
    def read() -> None: ...

    times: dict[Callable[[], object], float] = {copy: 10.0, read: 4.0}
    assert best({"copy": Traffic(copy, 80), "sum": Traffic(read, 40)}, lambda work: times[work]) == (10.0, "sum")


def test_traffic_moves_the_bytes_it_says() -> None:
    source = torch.randn(1 << 12)
    found = device_traffic(source)
    assert {name: some.moved for name, some in found.items()} == {"copy": 1 << 15, "sum": 1 << 14, "amax": 1 << 14}
    copied: Any = found["copy"].work()
    assert torch.equal(copied.view(torch.float32), source) and copied.data_ptr() != source.data_ptr()
    assert torch.equal(torch.as_tensor(found["sum"].work()), source.sum())
    host, target = torch.arange(9, dtype=torch.uint8), torch.zeros(9, dtype=torch.uint8)
    (bus,) = bus_traffic(host, target).values()
    bus.work()
    assert bus.moved == 9 and torch.equal(target, host)


def test_a_roofline_is_the_slower_of_memory_and_bus() -> None:
    band = Bandwidths(device=100.0, bus=2.0, by="sum")
    assert (band.roofline_us(1000.0), band.roofline_us(1000.0, 10.0), band.roofline_us(1000.0, 40.0)) == (10.0, 10.0, 20.0)
    assert isnan(band.roofline_us(nan, 40.0)) and isnan(band.roofline_us(1000.0, nan))


def test_percentiles_of_few_times() -> None:
    assert percentiles([3.0, 1.0, 2.0]) == (1.0, 2.0, 3.0) and percentiles([5.0]) == (5.0, 5.0, 5.0)


@pytest.mark.parametrize("op", ["scan", "compact", "rerank"])
def test_bytes_of_products_are_those_of_the_committed_rows(op: str) -> None:
    (row,) = [row for row in Table.read(FOLDER / "gpu_ops.csv").rows if (row["op"], row["tokens"]) == (op, "131072")]
    method = CONFIGS["product"](131_072)
    assert byte_counts.stages(method, EIGHT_B, byte_counts.zones_of(method, 131_072))[op].device == float(row["device_bytes"])


def test_codes_of_balanced_keys_have_norms_maps_and_weights_of_eight_bits() -> None:
    found = {}
    for name in ("product", "balanced-5%", "balanced-plain", "paper"):
        method = CONFIGS[name](131_072)
        found[name] = byte_counts.stages(method, EIGHT_B, byte_counts.zones_of(method, 131_072))
    zone, candidates = 131_072 - 64 - 256, 6538
    product, balanced = found["product"], found["balanced-5%"]
    spans = zone // 64
    shifts = 32 * 4 * spans  # per query head and span, written once and read by both stages
    assert balanced["scan"].device - product["scan"].device == 8 * zone + shifts  # a byte per key and its norm
    assert product["rerank"].device - balanced["rerank"].device == 8 * candidates * 16 - shifts  # a byte less per weight
    centred = 8 * 8 * 128 + 8 * 128 * spans + shifts  # two means per KV head, cos and sin per span
    assert balanced["tables"].device - product["tables"].device == 7 * 4 * 128**2 + centred  # a map per KV head
    assert found["balanced-plain"]["rerank"] == product["rerank"]
    assert found["paper"]["tables"].device > product["tables"].device
    assert product["attend+merge"] == Moved(8 * (64 + 256 + 1) * 512, 8 * 100 * 512)
    own, rest = (byte_counts.step(CONFIGS[name](131_072), EIGHT_B, 131_072) for name in ("balanced", "balanced-rest"))
    more = rest.device - own.device
    assert more == 8 * (zone // 64) * 512


def test_steps_of_whole_models_add_up() -> None:
    sizes, method = SHAPES["llama-3.1-8b"], CONFIGS["balanced"](65_536)
    weights, layer = byte_counts.weight_bytes(sizes), byte_counts.step(method, EIGHT_B, 65_536)
    assert 14.9e9 < weights < 15.1e9
    assert byte_counts.step_of_model(sizes, 65_536, 3, None) == Moved(weights + 3 * 32 * 8 * 65_536 * 512)
    assert byte_counts.step_of_model(sizes, 65_536, 3, method) == Moved(weights + 96 * layer.device, 96 * layer.bus)
    assert isnan(byte_counts.step_of_model(sizes, 65_536, 1, CONFIGS["prkv"](65_536)).device)
    assert Moved(10.0, 6.0).reading(2.0) == Moved(14.0, 2.0)


def test_rows_say_which_versions_made_them(tmp_path: Path) -> None:
    found = rows.environment()
    assert found["transformers"] != "none" and found["kvrecall"] != "none"
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n")
    assert rows._driver(tmp_path / "version") == "580.65.06" and rows._driver(tmp_path / "none") == "none"


def test_a_check_holds_without_asserts() -> None:
    program = "from benchmarks.checks import require\nassert False\nrequire(False, 'other ids')"
    run = subprocess.run([sys.executable, "-O", "-c", program], capture_output=True, text=True)
    assert run.returncode and "CheckError: other ids" in run.stderr
    require(True, "")


def _refused(*_: Any) -> None:
    raise CheckError("head 3: relative error 0.5")


def _never(*_: Any, **__: Any) -> Any:
    raise RuntimeError("timed all the same")


def test_a_layer_that_fails_its_check_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_layer.Bench, "__init__", lambda *_: None)
    monkeypatch.setattr(gpu_layer.Bench, "check", _refused)
    monkeypatch.setattr(gpu_layer, "timed", _never)
    with pytest.raises(CheckError, match="head 3"):
        gpu_layer.measure("8b", 65_536, "balanced")


def test_an_operation_that_fails_its_check_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gpu_ops.OPS, "scan", lambda *_: gpu_ops.Op(1, _never, _refused, 1.0))
    monkeypatch.setattr(gpu_ops, "timed", _never)
    with pytest.raises(CheckError, match="head 3"):
        gpu_ops.measure("8b", 65_536, "scan")


def test_a_system_that_fails_its_check_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = object.__new__(gpu_methods.Layers)
    layers.layers, layers._checked = [type("Wrong", (), {"check": _refused})()], False  # type: ignore[list-item]
    layers.new, layers.params = [torch.zeros(1)] * 3, gpu_methods.AttentionParams(1.0)
    monkeypatch.setattr(gpu_methods, "_layers", lambda *_: layers)
    monkeypatch.setattr(gpu_methods, "timed", _never)
    with pytest.raises(CheckError, match="head 3"):
        gpu_methods.measure("8b", 65_536, "prkv")

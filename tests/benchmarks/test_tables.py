"""notebook/performance.md: its tables and figures are those of the committed rows; new rows join them; projections say so."""

from __future__ import annotations

from dataclasses import fields
from importlib import import_module
from pathlib import Path

import pytest
from scripts.bench_table import PAGE, page
from scripts.tables.bench import decode
from scripts.tables.bench.rows import FOLDER, Row, Table, number

from benchmarks.rows import environment

KEYS = {
    "cpu_layer": "shape dtype tokens method", "cpu_methods": "shape dtype tokens method",
    "gpu_layer": "shape tokens config layers", "gpu_methods": "shape tokens system captured layers",
    "gpu_ops": "shape tokens op captured calls", "gpu_decode": "shape layers context batch config",
    "gpu_prefill": "shape layers context chunk_tokens config",
}  # fmt: skip


def test_the_page_is_that_of_the_rows() -> None:
    assert page() == PAGE.read_text(encoding="utf-8"), "run `python -m scripts.bench_table --write`"


def test_figures_are_those_of_the_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    from scripts import bench_plot

    committed = bench_plot.FIGURES
    monkeypatch.setattr(bench_plot, "FIGURES", tmp_path)
    for name in bench_plot.DRAWN:
        bench_plot.draw(name)
        assert f"(figures/{name}.svg)" in PAGE.read_text(encoding="utf-8") and (committed / f"{name}.svg").exists()
    before = (tmp_path / "gpu_decode.svg").read_bytes()
    bench_plot.draw("gpu_decode")
    assert (tmp_path / "gpu_decode.svg").read_bytes() == before


@pytest.mark.parametrize("path", sorted(FOLDER.glob("[cg]pu_*.csv")), ids=lambda p: p.stem)
def test_columns_before_the_first_time_name_a_row(path: Path) -> None:
    table = Table.read(path)
    assert table.key == KEYS[path.stem].split()
    keys = [tuple(row[k] for k in table.key) for row in table.rows]
    assert len(set(keys)) == len(keys)


def test_new_rows_take_the_places_of_old_ones_and_leave_the_others(tmp_path: Path) -> None:
    (tmp_path / "old.csv").write_text("tokens,config,p50_ms,full_ms,gpu\n1,a,5,7,x\n2,a,6,8,x\n")
    (tmp_path / "new.csv").write_text("tokens,config,p50_ms,full_ms,extra,gpu\n2,a,3,nan,9,y\n4,a,1,2,9,y\n1,a,nan,nan,9,y\n")
    table = Table.read(tmp_path / "old.csv")
    told = table.add(Table.read(tmp_path / "new.csv"))
    assert told == ["2 a: replaced, without full_ms", "4 a: added", "1 a: left out, nothing was measured"]
    table.write(tmp_path / "old.csv")
    expected = "tokens,config,p50_ms,full_ms,extra,gpu\n1,a,5,7,,x\n2,a,3,nan,9,y\n4,a,1,2,9,y\n"
    assert (tmp_path / "old.csv").read_text() == expected
    into = Table.read(tmp_path / "none.csv")
    assert into.add(table) == ["1 a: added", "2 a: added", "4 a: added"] and into.rows == table.rows


def test_rows_of_another_benchmark_are_refused() -> None:
    with pytest.raises(ValueError, match="named by tokens, the new ones by system"):
        Table(["tokens", "p50_us"], []).add(Table(["system", "p50_us"], []))
    with pytest.raises(ValueError, match="name a row and then times"):
        Table(["tokens", "gb_per_s"], []).add(Table([], []))


def test_a_roofline_is_no_measurement() -> None:
    old = Table(["tokens", "p50_us", "gpu"], [{"tokens": "1", "p50_us": "5", "gpu": "x"}])
    new = Table(["tokens", "p50_us", "roofline_us", "full_roofline_ms", "gpu"],
                [{"tokens": "1", "p50_us": "nan", "roofline_us": "3", "full_roofline_ms": "4", "gpu": "y"}])  # fmt: skip
    assert old.add(new) == ["1: left out, nothing was measured"] and new.times == ["p50_us"]
    assert old.rows[0]["p50_us"] == "5" and "roofline_us" in old.columns


@pytest.mark.parametrize("name", ["gpu_layer", "gpu_ops", "gpu_decode", "gpu_methods", "gpu_prefill"])
def test_rows_of_today_join_the_committed_ones(name: str) -> None:
    table = Table.read(FOLDER / f"{name}.csv")
    before = [dict(row) for row in table.rows]
    columns = [f.name for f in fields(import_module(f"benchmarks.{name}").Row)] + list(environment())
    new = Table(columns, [dict.fromkeys(columns, "7")])
    assert new.key == table.key and table.add(new) == [" ".join(["7"] * len(new.key)) + ": added"]
    assert table.rows == [*before, new.rows[0]] and set(columns) <= set(table.columns)


def test_full_attention_is_above_its_own_bytes() -> None:
    pytest.importorskip("matplotlib")
    from scripts.bench_plot import SHEET

    from benchmarks import byte_counts, models
    from benchmarks.gpu_layer import SHAPES

    for row in Table.read(FOLDER / "gpu_layer.csv").rows:
        bytes_read = byte_counts.Heads(*SHAPES[row["shape"]]).cache_bytes(int(row["tokens"]))
        assert SHEET.roofline_us(bytes_read) < number(row, "full_p50_us")
    for row in Table.read(FOLDER / "gpu_decode.csv").rows:
        sizes = models.SHAPES[row["shape"]] | {"num_hidden_layers": int(row["layers"])}
        step = byte_counts.step_of_model(sizes, int(row["context"]), int(row["batch"]), None)
        assert not number(row, "full_p50_ms") < SHEET.roofline_us(step.device) / 1e3


def row(layers: int, context: int, batch: int, config: str, ours: float | None = None, full: float | None = None) -> Row:
    """1 GiB per layer and sequence of full attention, a sixteenth of it for retrieval; 16 GiB of weights, of 140."""
    found: dict[str, object] = {"shape": "llama-3.1-8b", "layers": layers, "context": context, "batch": batch, "config": config}
    sides = {"retrieval": (ours, layers * batch / 16), "full": (full, layers * batch)}
    for side, (ms, gib) in sides.items():
        found |= {f"{side}_p50_ms": "nan" if ms is None else ms, f"{side}_device_gib": "nan" if ms is None else gib}
    found |= {"retrieval_worst_ms": 2 * (ours or 0), "host_gib": layers * batch, "weights_gib": layers / 2, "total_gib": 140}
    return {name: str(value) for name, value in found.items()}


def test_a_whole_model_is_projected_along_a_line() -> None:
    rows = [row(8, 1 << 20, 1, "product", 3.0, 9.0), row(16, 1 << 20, 1, "product", 5.0, 17.0)]
    (ours,), (full,) = decode.retrieval_steps(rows), decode.full_steps(rows)
    assert (ours.ms, ours.layers, ours.host_gib, ours.weights_gib) == (9.0, (8, 16), 32.0, 16.0)
    assert full.ms == 33.0 and full.fits and ours.rate == pytest.approx(1000 / 9)
    table = decode.steps(rows)
    assert "9.0 ms (projected) | – | 33.0 ms (projected) | **3.67×**" in table and "(8 and 16)" in table
    assert decode.retrieval_steps(rows[:1]) == []  # one count says nothing about the rest of the model


def test_a_measured_model_is_not_projected_but_checks_the_line() -> None:
    rows = [row(8, 4096, 1, "product", 3.0), row(16, 4096, 1, "product", 5.0), row(32, 4096, 1, "product", 9.5, 12.0)]
    (ours,) = decode.retrieval_steps(rows)
    assert (ours.ms, ours.layers) == (9.5, ()) and "9.50 ms | 19.00 ms | 12.00 ms" in decode.steps(rows)
    assert "4K product 9.00 projected, 9.50 measured" in decode.steps(rows)


def test_throughput_takes_the_largest_batches_that_fit() -> None:
    retrieval = [row(n, 131072, 28, "product", 2.0 + n) for n in (3, 6)]
    full = [row(32, 131072, 3, "full", None, 30.0), row(8, 131072, 4, "full", None, 5.0), row(16, 131072, 4, "full", None, 9.0)]
    table = decode.throughput([*retrieval, *full])
    assert "| 28 | 34.0 ms (projected) | 824 | 896 GiB | 3 | 30.00 ms | 100 | **8.24×** |" in table  # four need 144 of 140 GiB
    assert "beside the weights: 3 at 128K" in table
    assert "| 896 GiB | – | – | – | – |" in decode.throughput(retrieval)
    assert decode.throughput([row(32, 65536, 1, "product", 8.0, 9.0)]) == "Not measured yet."


def test_compiled_rows_are_compared_with_compiled_ones_only() -> None:
    plain, compiled = row(32, 131072, 1, "product", 9.0, 11.0), row(32, 131072, 1, "product+compiled", 6.0, 8.0)
    assert [(s.config, s.ms) for s in decode.full_steps([plain, compiled])] == [("full", 11.0), ("full+compiled", 8.0)]
    table = decode.steps([plain, compiled])
    assert "| product | 9.00 ms | 18.00 ms | 11.00 ms | **1.22×** |" in table
    assert "| product+compiled | 6.00 ms | 12.00 ms | 8.00 ms | **1.33×** |" in table
    alone = row(32, 131072, 1, "product+compiled", 6.0)
    assert "| product+compiled | 6.00 ms | 12.00 ms | – | – |" in decode.steps([plain, alone])
    beside = row(32, 131072, 1, "full+compiled", None, 7.0)
    assert "| 6.00 ms | 12.00 ms | 7.00 ms |" in decode.steps([plain, alone, beside])
    batches = [row(32, 131072, 28, "product+compiled", 40.0), row(32, 131072, 4, "full", None, 30.0)]
    assert "| 896 GiB | – | – | – | – |" in decode.throughput(batches)
    assert "| 3 | 20.00 ms | 150 |" in decode.throughput([*batches, row(32, 131072, 3, "full+compiled", None, 20.0)])


def test_a_cell_that_is_no_number_is_none() -> None:
    assert all(number({"a": text}, "a") != number({"a": text}, "a") for text in ("", "nan", "out of memory"))
    assert number({"a": "1.5"}, "a") == 1.5 and number({}, "a") != number({}, "a")

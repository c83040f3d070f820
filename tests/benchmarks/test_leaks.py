"""The search for leaks finds each kind of leak that is put in, and none where there is none."""

from __future__ import annotations

import csv
import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import leaks


@pytest.fixture(scope="module", autouse=True)
def frozen_again() -> Iterator[None]:
    """The search for leaks ends with `gc.unfreeze()`; the suite's own objects are frozen (`tests/conftest.py`)."""
    yield
    gc.collect()
    gc.freeze()


SMALL = ["--methods", "exact", "--steps", "100", "--calls", "10"]


def test_nothing_leaks_and_the_rows_say_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "leaks.csv"
    # A first time, so that what is imported and compiled late is there.
    leaks.main(["--methods", "exact", "--steps", "20", "--calls", "2"])
    assert leaks.main([*SMALL, "--out", str(out)]) == 0, capsys.readouterr().out
    with out.open() as file:
        rows = list(csv.DictReader(file))
    assert {row["run"] for row in rows} == {"steps", "generate"} and {row["repeats"] for row in rows} == {"100", "10"}
    assert {"resident_bytes", "files", "threads", "handlers", "registrations"} <= {row["resource"] for row in rows}
    assert rows[0]["cpu"] and rows[0]["torch"]


@pytest.mark.parametrize("resource", ["resident_bytes", "objects", "files", "threads", "handlers", "registrations"])
def test_a_leak_is_found_and_named(resource: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert leaks.main(["--methods", "exact", "--steps", "100", "--calls", "2", "--inject", resource]) == 1
    assert f"exact steps: {resource}" in capsys.readouterr().out


def test_one_outlier_is_no_leak_and_a_slow_rise_is_one() -> None:
    flat = [(i, 5 + (1000 if i == 20 else 0)) for i in range(25)]
    assert leaks.slope(flat) == 0
    assert leaks.slope([(i, value + 3 * i) for i, value in flat]) == pytest.approx(3, abs=0.1)
    assert leaks.slope([(i, -2 * i) for i in range(25)]) == -2


def test_every_method_that_it_names_can_be_made() -> None:
    for name in leaks.METHODS.split(","):
        zones = leaks.chosen_method(name).zone_sizes()
        assert name == "full" or zones.sink_tokens + zones.local_tokens < leaks.PROMPT_TOKENS / 2

"""Rows of the benchmarks: how they are read, which columns name a row, and how new ones join those that are there."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from math import isnan, nan
from pathlib import Path

from scripts.tables.common import ROOT

FOLDER = ROOT / "benchmarks" / "results"
TIMES = ("_us", "_ms", "_s")
"""How names of times end, but for rooflines, which are counted. The columns in front of the first time say what was measured:
they are the row's key."""
Row = dict[str, str]


@dataclass
class Table:
    """A CSV file of one benchmark."""

    columns: list[str]
    rows: list[Row]

    @property
    def key(self) -> list[str]:
        """The columns that name a row. Where it was measured is none of them: a new measurement takes an old one's place."""
        first = next((i for i, name in enumerate(self.columns) if _is_time(name)), 0)
        if not first:
            raise ValueError(f"expected columns that name a row and then times (…{', …'.join(TIMES)}), got {self.columns}")
        return self.columns[:first]

    @property
    def times(self) -> list[str]:
        """The columns that hold times."""
        return [name for name in self.columns if _is_time(name)]

    @staticmethod
    def read(path: Path) -> Table:
        """Reads a file; one that is not there has no rows."""
        if not path.exists():
            return Table([], [])
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            return Table(list(reader.fieldnames or []), list(reader))

    def write(self, path: Path) -> None:
        """Writes all rows; one that lacks a column is empty there."""
        with path.open("w", newline="") as file:
            out = csv.DictWriter(file, self.columns, restval="")
            out.writeheader()
            out.writerows(self.rows)

    def add(self, new: Table) -> list[str]:
        """Takes rows in, in place of those with the same key, else behind them; says what became of each.

        A row without any time is left out, as one that did not fit. Columns that only one side has stay, empty in the other's
        rows. Raises ValueError where rows have other keys.
        """
        if not self.columns:
            self.columns = list(new.columns)
        if self.key != new.key:
            raise ValueError(f"rows are named by {', '.join(self.key)}, the new ones by {', '.join(new.key)}")
        kept = [name for name in self.columns if name not in new.columns]
        self.columns = [*new.columns, *kept]
        places = {tuple(row[k] for k in self.key): i for i, row in enumerate(self.rows)}
        told = []
        for row in new.rows:
            key = tuple(row[k] for k in self.key)
            name = " ".join(key)
            if all(isnan(number(row, column)) for column in new.times):
                told.append(f"{name}: left out, nothing was measured")
            elif key in places:
                before = self.rows[places[key]]
                lost = [c for c in self.times if not isnan(number(before, c)) and isnan(number(row, c))]
                self.rows[places[key]] = row
                told.append(f"{name}: replaced" + (f", without {', '.join(lost)}" if lost else ""))
            else:
                places[key] = len(self.rows)
                self.rows.append(row)
                told.append(f"{name}: added")
        return told


def number(row: Row, column: str) -> float:
    """A cell as a number; nan where there is none."""
    text = row.get(column) or "nan"
    try:
        return float(text)
    except ValueError:
        return nan


def tokens(count: int) -> str:
    """A number of tokens as people say it."""
    return f"{count // 1024}K" if count < 1 << 20 else f"{count >> 20}M"


def _is_time(column: str) -> bool:
    return column.endswith(TIMES) and "_per_" not in column and "roofline" not in column

"""Writes the tables and figures of notebook/results.md from committed rows, and takes new samples into those rows.

python -m scripts.results_tables [--drop RUN …] [--add PACKED.jsonl.gz …] [--write]

--drop: runs whose answers are forgotten before others are added, such as those of an older plan.
--add: files of `scripts/results.py pack`; their answers join benchmarks/results/evaluation_*.
--write: the page and its figures; without it the page is printed as it would be.   (figures: `pip install ".[plot]"`)
"""

from __future__ import annotations

import argparse
from pathlib import Path

from scripts.results import read_plan
from scripts.tables.common import ROOT, filled
from scripts.tables.evaluation import figures
from scripts.tables.evaluation.pages import TABLES
from scripts.tables.evaluation.rows import Rows

PAGE = ROOT / "notebook" / "results.md"


def page(rows: Rows) -> str:
    """notebook/results.md with its tables made anew."""
    text = PAGE.read_text(encoding="utf-8")
    for name, make in TABLES.items():
        text = filled(text, name, make(rows))
    return text


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--add", nargs="+", type=Path, default=[], metavar="PACKED.jsonl.gz")
    parser.add_argument("--drop", nargs="+", default=[], metavar="RUN")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    rows = Rows(read_plan())
    for run in args.drop:
        print(f"{run}: {rows.drop(run)} rows forgotten")
    for file in args.add:
        print(*rows.add(file), sep="\n")
    if args.add or args.drop:
        rows.write()
    if args.write:
        PAGE.write_text(page(rows), encoding="utf-8")
        print(*figures.draw(rows, ROOT / "notebook" / "figures"), sep="\n")
    elif not (args.add or args.drop):
        print(page(rows))


if __name__ == "__main__":
    main()

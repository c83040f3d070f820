"""Makes the tables of notebook/performance.md from the committed rows of the benchmarks.

python -m scripts.bench_table [--write]

--write: into the page, between its markers; without it the tables are printed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

from scripts.tables.bench import decode, layers
from scripts.tables.bench.rows import FOLDER, Row, Table
from scripts.tables.common import ROOT, filled

PAGE = ROOT / "notebook" / "performance.md"
TABLES: dict[str, tuple[str, Callable[[list[Row]], str]]] = {
    "stages": ("gpu_layer", layers.stages),
    "systems": ("gpu_methods", layers.systems),
    "decode": ("gpu_decode", decode.steps),
    "throughput": ("gpu_decode", decode.throughput),
    "prefill": ("gpu_prefill", decode.prefill),
    "cpu": ("cpu_layer", layers.cpu),
    "cpu methods": ("cpu_methods", layers.cpu),
}
"""By marker: the file of the rows, and what makes a table of them."""


def tables() -> dict[str, str]:
    """All tables, by marker."""
    return {name: make(Table.read(FOLDER / f"{file}.csv").rows) for name, (file, make) in TABLES.items()}


def page() -> str:
    """notebook/performance.md with its tables made anew."""
    text = PAGE.read_text(encoding="utf-8")
    for name, table in tables().items():
        text = filled(text, name, table)
    return text


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    if parser.parse_args().write:
        PAGE.write_text(page(), encoding="utf-8")
    else:
        print(*(f"{name}\n\n{table}\n" for name, table in tables().items()), sep="\n")


if __name__ == "__main__":
    main()

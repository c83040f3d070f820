"""Takes rows of a benchmark's run into a committed file: those with the same key are replaced, all others stay.

python -m scripts.bench_rows --add NEW.csv [--add …] benchmarks/results/gpu_decode.csv

The key is what a row was asked for: all columns in front of the first time. `python -m scripts.bench_table --write` and
`python -m scripts.bench_plot` then make the page's tables and figures anew.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from scripts.tables.bench.rows import Table


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--add", action="append", type=Path, required=True, metavar="NEW.csv", help="may be repeated")
    parser.add_argument("into", type=Path, metavar="INTO.csv")
    args = parser.parse_args()
    table = Table.read(args.into)
    for file in args.add:
        if not file.exists():
            parser.error(f"expected a file of rows, got {file}, which is not there")
        try:
            print(*table.add(Table.read(file)), sep="\n")
        except ValueError as error:
            parser.error(f"{file}: {error}")
    table.write(args.into)


if __name__ == "__main__":
    main()

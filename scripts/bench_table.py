"""Prints the rows of benchmarks/results/cpu_layer.csv as the Markdown table of docs/performance.md.

python scripts/bench_table.py [FILE.csv]
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

DEFAULT = Path(__file__).parent.parent / "benchmarks" / "results" / "cpu_layer.csv"


def main() -> None:
    """One line per row; times in ms, the median of each."""
    with Path(sys.argv[1] if len(sys.argv) > 1 else DEFAULT).open() as file:
        rows = list(csv.DictReader(file))
    print("| shape | dtype | tokens | method | step (of it search) | SDPA, enable_gqa | SDPA, folded | speed-up | attended |")
    print("|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        ours, search = float(row["retrieval_p50_ms"]), float(row["search_ms"])
        gqa, folded = float(row["sdpa_gqa_p50_ms"]), float(row["sdpa_folded_p50_ms"])
        times = f"{ours:.2f} ({search:.2f}) | {gqa:.2f} | {folded:.2f} | **{float(row['speedup']):.2f}×**"
        what = f"{row['shape']} | {row['dtype']} | {int(row['tokens']) // 1024}K | {row['method']}"
        print(f"| {what} | {times} | {float(row['attended_tokens']):.0f} |")
    last = rows[-1]
    versions = f"Python {last['python']}, torch {last['torch']}, numba {last['numba']}"
    print(f"\n{last['cpu']}, {last['threads']} threads, {versions}; medians, ms.")


if __name__ == "__main__":
    main()

"""Prints the tables of notebook/methods/pariskv.md from traces (`kvrecall trace`).

python scripts/recall_tables.py 8k.safetensors 16k.safetensors
"""

from __future__ import annotations

import sys
from pathlib import Path

from kvrecall.evaluate.recall import LayerRecall, replay
from kvrecall.evaluate.trace import Trace
from kvrecall.methods import get

COLUMNS = (("pariskv", "mean_q"), ("pariskv", "mean_softmax"), ("pariskv", "per_head"))


def main() -> None:
    """One table per trace: every layer, then the mean; then one line per method for the means."""
    for path in map(Path, sys.argv[1:]):
        trace = Trace.load(path)
        info = trace.info
        print(f"### {info.model}, {info.prompt_tokens:,} prompt tokens, {info.steps} decode steps\n")
        reports = {mode: replay(trace, get(name, gqa=mode)) for name, mode in COLUMNS}
        _layers(reports)
        print("\n| method, gqa | coarse recall | recall | mass | zone mass ÷ exact | attended | fetched |")
        print("|---|---|---|---|---|---|---|")
        for mode, rows in reports.items():
            _means(f"ParisKV, {mode}", rows[-1])
        for mode in ("mean_q", "mean_softmax", "per_head"):
            _means(f"Exact, {mode}", replay(trace, get("exact", gqa=mode))[-1])
        print()


def _layers(reports: dict[str, list[LayerRecall]]) -> None:
    print("| layer | " + " | ".join(f"{mode}: coarse · final · mass" for mode in reports) + " | exact mass |")
    print("|---" * (len(reports) + 2) + "|")
    for rows in zip(*reports.values(), strict=True):
        label = "**mean**" if rows[0].layer is None else str(rows[0].layer)
        cells = [f"{r.coarse_recall:.2f} · {r.recall:.2f} · {r.mass:.3f}" for r in rows]
        print(f"| {label} | " + " | ".join(cells) + f" | {rows[0].exact_mass:.3f} |")


def _means(label: str, mean: LayerRecall) -> None:
    coarse = "–" if mean.coarse_recall is None else f"{mean.coarse_recall:.3f}"
    shares = f"{mean.recall:.3f} | {mean.mass:.3f} | {mean.zone_mass_ratio:.3f}"
    print(f"| {label} | {coarse} | {shares} | {mean.attended_tokens:.0f} | {mean.fetched_tokens:.0f} |")


if __name__ == "__main__":
    main()

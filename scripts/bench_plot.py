"""Draws benchmarks/results/gpu_layer.csv: latency of one layer against context, with the rooflines.

python scripts/bench_plot.py [FILE.csv [FILE.svg]]          (needs `pip install "kvrecall[plot]"`)
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).parent.parent
DEVICE_BYTES_PER_US, BUS_BYTES_PER_US = 4.27e6, 50e3
"""A device copy, read and written bytes together, and rows read from page-locked host memory."""
KV_HEADS, DIM, TOP_K = 8, 128, 100


def main() -> None:
    """One line per configuration, one for full attention, and the fewest microseconds their bytes allow."""
    source = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "benchmarks" / "results" / "gpu_layer.csv"
    target = Path(sys.argv[2]) if len(sys.argv) > 2 else ROOT / "docs" / "figures" / "gpu_layer.svg"
    with source.open() as file:
        rows = list(csv.DictReader(file))
    plt.rcParams["svg.hashsalt"] = "kvrecall"  # the same file from the same numbers
    figure, axes = plt.subplots(figsize=(7, 4.2))
    for name in dict.fromkeys(row["config"] for row in rows):
        own = [row for row in rows if row["config"] == name]
        axes.plot([int(r["tokens"]) for r in own], [float(r["retrieval_p50_us"]) for r in own], "o-", label=f"ParisKV, {name}")
    own = [row for row in rows if row["config"] == rows[0]["config"]]
    tokens = [int(row["tokens"]) for row in own]
    axes.plot(tokens, [float(row["full_p50_us"]) for row in own], "s-", color="black", label="full attention (cuDNN)")
    full = [4 * DIM * KV_HEADS * n / DEVICE_BYTES_PER_US for n in tokens]
    axes.plot(tokens, full, ":", color="black", label="its bytes at copy bandwidth")
    ours = [
        KV_HEADS * (n * DIM / 8 + int(row["candidates"]) * 6 * DIM / 8) / DEVICE_BYTES_PER_US
        + KV_HEADS * TOP_K * 4 * DIM / BUS_BYTES_PER_US
        for n, row in zip(tokens, own, strict=True)
    ]
    axes.plot(tokens, ours, ":", color="tab:blue", label="ParisKV's bytes at copy and bus bandwidth")
    axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel="µs per layer and step")
    axes.set_xticks(tokens, [f"{n // 1024}K" if n < 1 << 20 else "1M" for n in tokens], minor=False)
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, metadata={"Date": None})


if __name__ == "__main__":
    main()

"""Reading a prompt, from the rows of `bench prefill`: what share of it the index takes."""

from __future__ import annotations

from scripts.tables.bench.rows import Row, number, tokens
from scripts.tables.common import markdown


def shares(rows: list[Row]) -> str:
    """Seconds of both ways to read a prompt and of the index, by length and configuration."""
    if not rows:
        return "Not measured yet."
    lines = []
    for row in sorted(rows, key=lambda r: (r["shape"], int(r["context"]), int(r["layers"]))):
        plain, ours, index, end, offload, pin = (
            f"{number(row, column):.2f}" for column in ("plain_s", "retrieval_s", "index_s", "settle_s", "offload_s", "pin_s")
        )
        lines.append([row["shape"], tokens(int(row["context"])), row["layers"], row["config"], f"{plain} s",
                      f"{ours} s", f"{index} s ({end})", f"**{100 * number(row, 'build_share'):.1f} %**",
                      f"{number(row, 'index_us_per_1k_tokens'):.0f} µs", f"{offload} s ({pin})"])  # fmt: skip
    headings = ["model", "context", "layers", "config", "plain prefill", "through kvrecall", "index (of it at the end)",
                "index / plain", "index per 1,000 tokens and layer", "rows to the host (of it page-locking)"]  # fmt: skip
    return markdown(headings, lines)

"""Tables of one layer: on the CPU, on a GPU by configuration and stage, and by system."""

from __future__ import annotations

from scripts.tables.bench.rows import Row, number, tokens
from scripts.tables.common import markdown

from benchmarks.gpu_layer import SHAPES

STAGES = {
    "tables_us": "queries, tables", "scan_us": "scan", "compact_us": "compact", "rerank_us": "rerank", "top_us": "top-k",
    "attend_us": "fetch + attend", "merge_us": "merge",
}  # fmt: skip
SYSTEMS = {
    "prkv": "PRKV", "louiskv-search": "LouisKV, searching", "louiskv-held": "LouisKV, holding",
    "louiskv-every-5": "LouisKV, one search in five steps", "ctkvr": "CTkvr",
}  # fmt: skip
"""What a page calls them; `…-uncaptured` are the same through the ordinary pipeline."""


def cpu(rows: list[Row]) -> str:
    """A step on the CPU against dense attention; medians in ms."""
    lines = []
    for row in rows:
        ours = f"{number(row, 'retrieval_p50_ms'):.2f} ({number(row, 'search_ms'):.2f})"
        dense = [f"{number(row, column):.2f}" for column in ("sdpa_gqa_p50_ms", "sdpa_folded_p50_ms")]
        lines.append([row["shape"], row["dtype"], tokens(int(row["tokens"])), row["method"], ours, *dense,
                      f"**{number(row, 'speedup'):.2f}×**", f"{number(row, 'attended_tokens'):.0f}"])  # fmt: skip
    last = rows[-1]
    versions = f"Python {last['python']}, torch {last['torch']}, numba {last['numba']}"
    headings = ["shape", "dtype", "tokens", "method", "step (of it search)", "SDPA, enable_gqa", "SDPA, folded", "speed-up",
                "attended"]  # fmt: skip
    return f"{markdown(headings, lines)}\n\n{last['cpu']}, {last['threads']} threads, {versions}; medians, ms."


def stages(rows: list[Row]) -> str:
    """A step on a GPU and its stages, by length and configuration; microseconds per layer."""
    lines = []
    for row in sorted(rows, key=lambda r: int(r["tokens"])):
        times = [f"{number(row, column):.1f}" for column in ("retrieval_p50_us", "full_p50_us")]
        alone = [f"{number(row, column):.1f}" for column in STAGES]
        lines.append([tokens(int(row["tokens"])), row["config"], *times, f"**{number(row, 'speedup'):.2f}×**", *alone])
    return markdown(["tokens", "config", "retrieval", "full attention", "speed-up", *STAGES.values()], lines)


def system(name: str) -> str:
    """What a page calls a system."""
    plain = name.removesuffix("-uncaptured")
    return SYSTEMS.get(plain, plain) + (", uncaptured" if plain != name else "")


def systems(rows: list[Row]) -> str:
    """A step of each system on a GPU, by length; microseconds per layer."""
    lines = []
    for row in sorted(rows, key=lambda r: int(r["tokens"])):
        ours, full, host = (number(row, column) for column in ("p50_us", "full_p50_us", "host_us"))
        lines.append([
            tokens(int(row["tokens"])), system(row["system"]), f"{ours:,.1f}" if ours < 1000 else f"{ours:,.0f}",
            f"{host:,.0f} ({row['host_threads']} threads)" if host else "–", f"{full:.1f}", f"**{full / ours:.2f}×**",
            f"{row['fetched_rows']}{_read(row)}", f"{int(row['attended_tokens']):,}",
        ])  # fmt: skip
    headings = ["tokens", "system", "µs per layer", "of it the host's", "full attention", "speed-up",
                "rows selected per KV head (of them read)", "attended"]  # fmt: skip
    return markdown(headings, lines)


def _read(row: Row) -> str:
    """How many of the selected rows came over the bus, where that was counted."""
    kv_heads, dim = SHAPES[row["shape"]][1:]
    return f" ({float(row['bus_bytes']) / (kv_heads * 4 * dim):.0f})" if row["bus_bytes"] else ""

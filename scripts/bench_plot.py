"""Draws the committed rows of the benchmarks: latency against context, for notebook/performance.md.

python -m scripts.bench_plot [gpu_layer gpu_decode gpu_methods]          (needs `pip install ".[plot]"`)
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from math import isnan, nan
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from scripts.tables.bench import decode, layers
from scripts.tables.bench.rows import FOLDER, Row, Table, number, tokens
from scripts.tables.common import ROOT

from benchmarks import byte_counts
from benchmarks.bandwidth import Bandwidths
from benchmarks.byte_counts import Heads, Moved
from benchmarks.gpu_layer import CONFIGS as LAYER_CONFIGS
from benchmarks.gpu_layer import SHAPES as LAYER_SHAPES
from benchmarks.models import COMPILED, FULL, SHAPES

FIGURES = ROOT / "notebook" / "figures"
SHEET = Bandwidths(device=4.8e6, bus=63e3, by="data sheet")
"""Peaks of an H200's memory and of PCIe 5.0 with 16 lanes, for rows without a roofline of their own."""


def gpu_layer(axes: Any, rows: list[Row]) -> None:
    """One line per configuration, one for full attention, and the fewest microseconds that its bytes and those of the first
    configuration allow."""
    for name in dict.fromkeys(row["config"] for row in rows):
        own = [row for row in rows if row["config"] == name]
        axes.plot([int(r["tokens"]) for r in own], [float(r["retrieval_p50_us"]) for r in own], "o-", label=f"ParisKV, {name}")
    own = [row for row in rows if row["config"] == rows[0]["config"]]
    counts = [int(row["tokens"]) for row in own]
    axes.plot(counts, [float(row["full_p50_us"]) for row in own], "s-", color="black", label="full attention (cuDNN)")
    full = [Moved(_heads(row).cache_bytes(n)) for n, row in zip(counts, own, strict=True)]
    _bound(axes, counts, [number(row, "full_roofline_us") for row in own], full, 1, "full attention", "black")
    ours = [byte_counts.step(LAYER_CONFIGS[row["config"]](n), _heads(row), n) for n, row in zip(counts, own, strict=True)]
    _bound(axes, counts, [number(row, "roofline_us") for row in own], ours, 1, f"ParisKV, {own[0]['config']}", "C0")
    axes.set(yscale="log", ylabel="µs per layer and step")
    _contexts(axes, counts)


def gpu_decode(axes: Any, rows: list[Row]) -> None:
    """One sequence: a line per configuration and one per kind of full attention, and the fewest milliseconds that the weights,
    keys and values of full attention allow. Open ones are projected from fewer layers."""
    ours = [step for step in decode.retrieval_steps(rows) if step.batch == 1]
    full = [step for step in decode.full_steps(rows) if step.batch == 1]
    models = dict.fromkeys(step.shape for step in [*ours, *full])
    for shape in models:
        of = f"{shape}, " if len(models) > 1 else ""
        for name in dict.fromkeys(step.config for step in ours if step.shape == shape):
            own = [step for step in ours if (step.shape, step.config) == (shape, name)]
            _steps(axes, own, "o", f"{of}{name}", None)
        for name, color in ((FULL, "black"), (FULL + COMPILED, "gray")):
            said = f"{of}full attention{name.removeprefix(FULL)}"
            _steps(axes, [step for step in full if (step.shape, step.config) == (shape, name)], "s", said, color)
    plain = [step for step in full if step.config == FULL]
    for shape in models:
        own = [step for step in plain if step.shape == shape]
        every = [byte_counts.step_of_model(SHAPES[shape], step.context, step.batch, None) for step in own]
        counts, said = [step.context for step in own], f"{shape}, full attention" if len(models) > 1 else "full attention"
        _bound(axes, counts, [step.roofline_ms for step in own], every, 1e3, said, "black")
    if any(step.layers for step in [*ours, *full]):
        axes.plot([], [], "o", color="gray", markerfacecolor="white", label="open: projected from fewer layers")
    axes.set(ylabel=f"ms per step, {', '.join(models)}", ylim=(0, None))
    _contexts(axes, [step.context for step in [*ours, *full]])


def gpu_methods(axes: Any, rows: list[Row]) -> None:
    """One line per system and one for full attention, which is measured beside each, and the fewest microseconds that its
    bytes allow."""
    for number_of, name in enumerate(dict.fromkeys(row["system"] for row in rows)):
        own = sorted((row for row in rows if row["system"] == name), key=lambda r: int(r["tokens"]))
        style = "o--" if name.endswith("uncaptured") else "o-"
        counts, times = [int(r["tokens"]) for r in own], [number(r, "p50_us") for r in own]
        axes.plot(counts, times, style, color=f"C{number_of}", label=layers.system(name))
    counts = sorted({int(row["tokens"]) for row in rows})
    full = [min(number(row, "full_p50_us") for row in rows if int(row["tokens"]) == n) for n in counts]
    axes.plot(counts, full, "s-", color="black", label="full attention")
    first = [next(row for row in rows if int(row["tokens"]) == n) for n in counts]
    least = [Moved(_heads(row).cache_bytes(n)) for n, row in zip(counts, first, strict=True)]
    known = [(int(row["tokens"]), number(row, "full_roofline_us")) for row in rows]
    own = [min((time for of, time in known if of == n and not isnan(time)), default=nan) for n in counts]
    _bound(axes, counts, own, least, 1, "full attention", "black")
    axes.set(yscale="log", ylabel="µs per layer and step")
    _contexts(axes, counts)


DRAWN: dict[str, Callable[[Any, list[Row]], None]] = {f.__name__: f for f in (gpu_layer, gpu_decode, gpu_methods)}


def _steps(axes: Any, steps: list[decode.Step], marker: str, label: str, color: str | None) -> None:
    """A line through all steps, with a filled marker for each that was measured and an open one for each that was not."""
    if not steps:
        return
    (line,) = axes.plot([s.context for s in steps], [s.ms for s in steps], "-", color=color)
    shade = line.get_color()
    for some, inside in (([s for s in steps if not s.layers], shade), ([s for s in steps if s.layers], "white")):
        axes.plot([s.context for s in some], [s.ms for s in some], marker, color=shade, markerfacecolor=inside)
    axes.plot([], [], f"{marker}-", color=shade, label=label)


def _heads(row: Row) -> Heads:
    return Heads(*LAYER_SHAPES[row["shape"]])


def _bound(axes: Any, counts: list[int], own: list[float], every: list[Moved], us: float, whose: str, color: str) -> None:
    """A line of the least times: `own` where rows have them, else of the bytes of `every` step by the data sheet; `us` of them
    make one of the axis."""
    sheet = [SHEET.roofline_us(step.device, step.bus) / us for step in every]
    known = [not isnan(time) for time in own]
    bus = f" and {SHEET.bus / 1e3:.0f} GB/s over the bus" if any(step.bus for step in every) else ""
    told = "bandwidth measured beside them" if all(known) else f"{SHEET.device / 1e6} TB/s{bus}, the data sheet's peak"
    if any(known) and not all(known):
        told = f"measured bandwidth, else at {told}"
    times = [time if has else least for time, has, least in zip(own, known, sheet, strict=True)]
    axes.plot(counts, times, ":", color=color, label=f"bytes of {whose}\nat {told}")


def _contexts(axes: Any, counts: Iterable[int]) -> None:
    """The axis of contexts, with a mark at every one that was measured."""
    every = list(dict.fromkeys(counts))
    axes.set(xscale="log", xlabel="tokens")
    axes.set_xticks(every, [tokens(n) for n in every], minor=False)


def draw(name: str) -> None:
    """One figure, the same file from the same rows."""
    plt.rcParams["svg.hashsalt"] = "kvrecall"
    figure, axes = plt.subplots(figsize=(10, 4.2))
    DRAWN[name](axes, Table.read(FOLDER / f"{name}.csv").rows)
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))  # beside the lines, of which it would hide some
    figure.tight_layout()
    FIGURES.mkdir(parents=True, exist_ok=True)
    figure.savefig(FIGURES / f"{name}.svg", metadata={"Date": None})
    plt.close(figure)


def main() -> None:
    """See the module's text."""
    for name in sys.argv[1:] or DRAWN:
        if name not in DRAWN:
            raise SystemExit(f"expected {', '.join(DRAWN)}, got {name}")
        draw(name)


if __name__ == "__main__":
    main()

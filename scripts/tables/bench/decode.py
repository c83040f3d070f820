"""Whole models: steps from the rows of `python -m benchmarks decode`, of all layers or projected from two counts, and prefill.

A step of L layers takes t(L) = a + b L: b is one layer's time, a that of the embedding, the head and the step itself. Two runs
with fewer layers give both, and so the step of the whole model, where host or device memory cannot hold all its layers. Bytes
are projected alike.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import isnan

from scripts.tables.bench.rows import Row, number, tokens
from scripts.tables.common import markdown

from benchmarks.models import COMPILED, FULL, SHAPES


def kind(config: str) -> str:
    """The configuration of the full attention that was measured beside: compiled beside compiled, plain beside plain."""
    return FULL + COMPILED if config.endswith(COMPILED) else FULL


@dataclass(frozen=True)
class Step:
    """A step of a whole model on one side; milliseconds, GiB. `layers`: counts it was projected from, none if measured.

    device_gib: of keys, values and summaries, beyond the weights. total_gib: the GPU's memory, roofline_ms: what the step's
    bytes take at the bandwidth measured beside it; nan where rows do not say.
    """

    shape: str
    context: int
    batch: int
    config: str
    layers: tuple[int, ...]
    ms: float
    worst_ms: float
    device_gib: float
    host_gib: float
    weights_gib: float
    total_gib: float
    roofline_ms: float

    @property
    def rate(self) -> float:
        """Tokens per second of all sequences."""
        return self.batch / self.ms * 1e3

    @property
    def fits(self) -> bool:
        """Whether the whole model can be held. What was measured could."""
        return not self.layers or not self.device_gib + self.weights_gib > self.total_gib

    @property
    def shown(self) -> str:
        """The time, and where it comes from."""
        if not self.layers:
            return f"{self.ms:.2f} ms"
        need = "" if self.fits else f"; does not fit, {self.device_gib + self.weights_gib:.0f} of {self.total_gib:.0f} GiB"
        return f"{self.ms:.1f} ms (projected{need})"


Key = tuple[str, int, int, str]
"""Model, context, batch, configuration."""


def retrieval_steps(rows: Iterable[Row]) -> list[Step]:
    """Steps with retrieval, by context, batch and configuration."""
    return _steps(rows, "retrieval")


def full_steps(rows: Iterable[Row]) -> list[Step]:
    """Steps with full attention, which depend on no configuration but on whether modules were compiled: "full+compiled"."""
    return _steps(rows, FULL)


def _steps(rows: Iterable[Row], side: str) -> list[Step]:
    every = (_whole(key, side, counts) for key, counts in _grouped(rows, side).items())
    return sorted((step for step in every if step is not None), key=lambda s: (s.shape, s.context, s.batch))


def _grouped(rows: Iterable[Row], side: str) -> dict[Key, dict[int, Row]]:
    """The rows in which a side was measured, by number of layers; the fastest, where several measured the same."""
    groups: dict[Key, dict[int, Row]] = {}
    for row in rows:
        ms, layers = number(row, f"{side}_p50_ms"), int(row["layers"])
        if not isnan(ms):
            config = kind(row["config"]) if side == FULL else row["config"]
            counts = groups.setdefault((row["shape"], int(row["context"]), int(row["batch"]), config), {})
            if layers not in counts or ms < number(counts[layers], f"{side}_p50_ms"):
                counts[layers] = row
    return groups


def _whole(key: Key, side: str, counts: dict[int, Row]) -> Step | None:
    """The measured step of all layers, else the projected one; None for a single count of fewer layers."""
    every = SHAPES[key[0]]["num_hidden_layers"]
    return _step(key, side, counts, ()) if every in counts else _projected(key, side, counts)


def _projected(key: Key, side: str, counts: dict[int, Row]) -> Step | None:
    """From the fewest and the most layers that are fewer than all."""
    fewer = sorted(n for n in counts if n < SHAPES[key[0]]["num_hidden_layers"])
    return _step(key, side, counts, (fewer[0], fewer[-1])) if len(fewer) > 1 else None


def _step(key: Key, side: str, counts: dict[int, Row], between: tuple[int, ...]) -> Step:
    every = SHAPES[key[0]]["num_hidden_layers"]

    def value(column: str) -> float:
        if not between:
            return number(counts[every], column)
        one, other = (number(counts[n], column) for n in between)
        return other + (other - one) / (between[1] - between[0]) * (every - between[1])

    return Step(
        *key, between, value(f"{side}_p50_ms"),
        number(counts[every], "retrieval_worst_ms") if not between and side != FULL else float("nan"),
        value(f"{side}_device_gib"), value("host_gib") if side != FULL else 0.0, value("weights_gib"),
        number(counts[between[-1] if between else every], "total_gib"),
        value("full_roofline_ms" if side == FULL else "roofline_ms"),
    )  # fmt: skip


def steps(rows: list[Row]) -> str:
    """One sequence: a step with retrieval and one with full attention, by context."""
    full = {(s.shape, s.context, s.config): s for s in full_steps(rows) if s.batch == 1}
    lines = []
    for step in (s for s in retrieval_steps(rows) if s.batch == 1):
        other = full.get((step.shape, step.context, kind(step.config)))
        worst = "–" if isnan(step.worst_ms) else f"{step.worst_ms:.2f} ms"
        line = [step.shape, tokens(step.context), step.config, step.shown, worst]
        if other is None:
            line += ["–", "–", f"{step.device_gib:.1f} GiB"]
        else:
            memory = f"{step.device_gib:.1f} GiB against {other.device_gib:.1f}"
            line += [other.shown, f"**{other.ms / step.ms:.2f}×**", memory]
        lines.append([*line, f"{step.host_gib:.1f} GiB"])
    headings = ["model", "context", "config", "retrieval, p50", "slowest step", "full attention", "speed-up",
                "device memory of the cache", "host memory"]  # fmt: skip
    return "\n\n".join([markdown(headings, lines), *_how(rows)])


def _how(rows: list[Row]) -> list[str]:
    """What is projected from what, and how far projections are from measurements where there are both."""
    sources = sorted({step.layers for step in (*retrieval_steps(rows), *full_steps(rows)) if step.layers})
    counts = "; ".join(f"{few} and {more}" for few, more in sources)
    told = []
    if sources:
        told.append(f"Projected: t(L) = a + b L through runs of fewer layers ({counts}), L the model's own; bytes alike.")
    checks = [text for side in ("retrieval", FULL) for text in _checks(rows, side)]
    if checks:
        told.append(f"The same projection where all layers were measured too, in ms: {'; '.join(checks)}.")
    return told


def _checks(rows: list[Row], side: str) -> list[str]:
    found = []
    for key, counts in _grouped(rows, side).items():
        whole, other = _whole(key, side, counts), _projected(key, side, counts)
        if whole is not None and other is not None and not whole.layers:
            found.append(f"{tokens(whole.context)} {whole.config} {other.ms:.2f} projected, {whole.ms:.2f} measured")
    return found


def throughput(rows: list[Row]) -> str:
    """Tokens per second of as many sequences as either side holds on one GPU."""
    full = [step for step in full_steps(rows) if step.fits]
    lines, room = [], []
    for most in _largest(step for step in retrieval_steps(rows) if step.fits):
        others = [s for s in full if (s.shape, s.context, s.config) == (most.shape, most.context, kind(most.config))]
        other = max(others, key=lambda s: s.batch, default=None)
        if most.batch == 1:  # nobody asked what this side can hold
            continue
        line = [most.shape, tokens(most.context), most.config, most.batch, most.shown, f"{most.rate:.0f}",
                f"{most.host_gib:.0f} GiB"]  # fmt: skip
        if other is None:
            lines.append([*line, "–", "–", "–", "–"])
            continue
        lines.append([*line, other.batch, other.shown, f"{other.rate:.0f}", f"**{most.rate / other.rate:.2f}×**"])
        hold = (other.total_gib - other.weights_gib) / (other.device_gib / other.batch)
        if not isnan(hold):
            room.append(f"{int(hold)} at {tokens(most.context)}")
    if not lines:
        return "Not measured yet."
    headings = ["model", "context", "config", "sequences", "step", "tokens/s", "host memory", "full attention: sequences",
                "step", "tokens/s", "ratio"]  # fmt: skip
    note = f"Sequences of full attention that the GPU's memory could hold beside the weights: {', '.join(dict.fromkeys(room))}."
    return "\n\n".join([markdown(headings, lines), *([note] if room else [])])


def _largest(steps: Iterable[Step]) -> list[Step]:
    """Of each model, context and configuration the step with the most sequences."""
    found: dict[tuple[str, int, str], Step] = {}
    for step in steps:
        key = step.shape, step.context, step.config
        if key not in found or step.batch > found[key].batch:
            found[key] = step
    return list(found.values())


def prefill(rows: list[Row]) -> str:
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

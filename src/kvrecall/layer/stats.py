"""What a cache reports about itself."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from kvrecall.core.structs import StepStats
from kvrecall.layer.state import LayerState
from kvrecall.methods.base import Method


@dataclass(frozen=True)
class LayerReport:
    """One layer, or the sum of all.

    tokens: per zone, summed over sequences (in a total: of one layer, since every layer holds the same tokens).
    device_bytes: resident rows, summaries, and rows of the retrieval zone where they lie on the device. host_bytes: where they
    lie on the host.
    """

    layer: int | None
    tokens: dict[str, int]
    device_bytes: int
    summary_bytes: int
    host_bytes: int
    counters: StepStats

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        own = asdict(self)
        counters = own.pop("counters")
        del counters["attended_tokens"], counters["attended_rows"]
        return own | {"attended_per_step": round(self.counters.attended_per_step, 2)} | counters


@dataclass(frozen=True)
class CacheStats:
    """Per layer and in total: tokens per zone, attended tokens per step, bytes held and moved, searches, time per stage."""

    method: str
    layers: tuple[LayerReport, ...]
    total: LayerReport

    @staticmethod
    def collect(method: Method, states: list[LayerState]) -> CacheStats:
        """Reads the counters of all layers; on a GPU this synchronises and reports non-finite keys."""
        layers = tuple(_report(state) for state in states)
        counters = StepStats()
        for report in layers:
            counters = counters.merged(report.counters)
        zero = {"sink": 0, "retrieval": 0, "local": 0, "buffer": 0}
        total = LayerReport(
            None, layers[0].tokens if layers else zero, sum(r.device_bytes for r in layers),
            sum(r.summary_bytes for r in layers), sum(r.host_bytes for r in layers), counters,
        )  # fmt: skip
        return CacheStats(method.name, layers, total)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {"method": self.method, "layers": [r.to_dict() for r in self.layers], "total": self.total.to_dict()}


def _report(state: LayerState) -> LayerReport:
    state.non_finite.check()
    zones = [state.store.zones(b) for b in range(state.store.sequences)]
    tokens = {name: sum(getattr(z, name) for z in zones) for name in ("sink", "retrieval", "local", "buffer")}
    summaries = 0 if state.index is None else state.index.nbytes
    rows = sum(pool.nbytes for pool in state.store.host)
    on_device, host = (rows, 0) if state.store.on_device else (0, rows)
    device = state.store.resident.nbytes + summaries + state.statics.nbytes + on_device
    return LayerReport(state.layer, tokens, device, summaries, host, state.stats)

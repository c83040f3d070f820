"""PRKV, LouisKV and CTkvr: one attention layer, one decode step, on a GPU, against full attention in device memory.

    python -m benchmarks methods --context 64k,128k [--systems prkv,louiskv-every-5] [--out FILE]

Rows by name: `prkv` (searches at every step), `louiskv-search`, `louiskv-held` (a step between two searches), `louiskv-every-5`
(the mean at one search in five steps, which the paper's threshold aims at for long inputs), each captured as a CUDA graph over
several layers, together several times the L2 cache; `…-uncaptured`: the same layers through `pipeline.decode_step`, where
launches and the host's waiting decide; `ctkvr`, whose rerank and attention to the selection are the CPU's, so it is never
captured: `host_threads` and `host_us` say how much of it the CPU does. Each has its own default budget (PRKV 1,024 tokens, a
quarter of them static, LouisKV 512, CTkvr 512). Full attention as in `gpu_layer`.

Data: keys, values and queries are standard normal in bf16; queries turn between steps, to a cosine of 0.93 with those before.
A step of LouisKV that searches has the queries of five steps behind the search before: it re-uses the rows of a selection that
is that old. `bus_bytes` counts the rows that were read.
PRKV's static tokens are drawn at random, since what a step costs depends on how many there are; LouisKV's clusters are k-means
of those keys, which have no structure, so sizes spread as they do for noise. CTkvr's observed queries are a chain of turning
queries of which the decode steps are the continuation. A captured row is the engine's own step of a layer (`layer.slots`),
with what a step does for tokens that leave the window; choosing static sets anew, which happens between steps, is not in it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, cast

import torch
import torch.nn.functional as F
from numba import get_num_threads
from torch import Tensor

from benchmarks.bandwidth import bandwidths
from benchmarks.byte_counts import NOT_COUNTED, Heads, Moved
from benchmarks.checks import require
from benchmarks.gpu_layer import COSINE, SHAPES, full_attention, turn
from benchmarks.gpu_ops import layers_for
from benchmarks.gpu_time import Times, timed
from benchmarks.gpu_unit_step import UnitStep
from benchmarks.statistics import even_statistics
from kvrecall.attend.reference import attend_rows
from kvrecall.core.launch import kernels_available
from kvrecall.core.numba import numba_threads
from kvrecall.core.structs import AttentionParams, Budget, HostTable, Rows
from kvrecall.index.base import LayerShape
from kvrecall.index.query_centroids import CentroidConfig, CentroidIndex
from kvrecall.index.units import UnitIndex
from kvrecall.layer.pipeline import decode_step
from kvrecall.layer.state import LayerState
from kvrecall.methods.base import Method
from kvrecall.methods.ctkvr import CTKVR
from kvrecall.methods.louiskv import LouisKV
from kvrecall.methods.prkv import PRKV
from kvrecall.select.queries import ObservedQueries
from kvrecall.static.choice import ObservationWindow, StaticSet

_STRIDE = 5
_STEPS = 50
"""Uncaptured steps that are timed."""
_ROOM = 1024
"""Captured steps to make room for."""
_BEHIND_DENSE = 2
"""Number of the layer in its model: LouisKV's first two are dense."""
METHODS: dict[str, Callable[[], Method]] = {
    "prkv": lambda: PRKV(full_attention_threshold=0),
    "louiskv": lambda: LouisKV(full_attention_threshold=0),
    "ctkvr": lambda: CTKVR(full_attention_threshold=0),
}
SYSTEMS = ("prkv", "prkv-uncaptured", "louiskv-search", "louiskv-held", f"louiskv-every-{_STRIDE}", "louiskv-search-uncaptured",
           "louiskv-held-uncaptured", "ctkvr")  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One comparison; times in microseconds per layer. host_threads, host_us: of CTkvr's search, attention and learning, which
    are the CPU's but for the comparison with the centroids; 0 for the others. units: pages or clusters per KV head.

    device_bytes, bus_bytes, full_bytes: what a layer's step must move, nan for CTkvr, whose host works on what it holds.
    roofline_us, full_roofline_us: the fewest microseconds for that at the bandwidths measured in the same process."""

    shape: str
    tokens: int
    system: str
    captured: bool
    layers: int
    p20_us: float
    p50_us: float
    p80_us: float
    full_p20_us: float
    full_p50_us: float
    full_p80_us: float
    full_backend: str
    speedup: float
    attended_tokens: int
    fetched_rows: int
    units: int
    host_threads: int
    host_us: float
    device_bytes: float
    bus_bytes: float
    roofline_us: float
    full_bytes: float
    full_roofline_us: float


class DeviceRows:
    """Rows of one sequence that still lie on the device, for indexes that look at them while they are built."""

    def __init__(self, rows: Tensor) -> None:
        self._rows, self.length = rows, rows.shape[1]

    def gather(self, ids: Tensor) -> Tensor:
        """See `RowSource`."""
        return torch.stack([rows[of.to(rows.device)] for rows, of in zip(self._rows, ids.long(), strict=True)]).cpu()

    def blocks(self, start: int = 0, stop: int | None = None, on_device: bool = False) -> Iterator[Tensor]:
        """See `RowSource`; on the device."""
        yield self._rows[:, start:stop]

    def stored(self, start: int = 0, stop: int | None = None) -> Iterator[Tensor]:
        """See `RowSource`; on the device."""
        return self.blocks(start, stop)

    def keys(self, start: int, stop: int, device: torch.device) -> Tensor:
        """See `RowSource`; a view."""
        return self._rows[:, start:stop, 0]

    def table(self, device: torch.device) -> HostTable | None:
        """See `RowSource`; none, for rows that are not in blocks."""
        return None


class Layers:
    """Layers of one length under one method, ready to step."""

    def __init__(self, shape: str, tokens: int, name: str) -> None:
        self.query_heads, self.heads, self.dim = SHAPES[shape]
        self.tokens, self.method, self.params = tokens, METHODS[name](), AttentionParams(self.dim**-0.5)
        self._between = _STRIDE if name == "louiskv" else 1  # steps from one search to the next
        self._generator, self._checked = torch.Generator("cuda").manual_seed(7), False
        self._now = torch.ones(1, dtype=torch.int64, device="cuda")
        self.new = [self._random(h, 1) for h in (self.query_heads, self.heads, self.heads)]
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.states: list[LayerState] = []
        # Summaries take 2 D numbers per 32 tokens or D per 16; CTkvr's pipeline is bound by the host, one layer shows it.
        count = 1 if name == "ctkvr" else layers_for(tokens * self.heads * self.dim // 8)
        for _ in range(count):
            self._add_layer()
        self.layers = [] if name == "ctkvr" else [UnitStep(state, _ROOM, self._now) for state in self.states]
        index = self.states[0].index
        self.units = index.units(0).reps.shape[1] if isinstance(index, UnitIndex) else 0
        self.resident = self.states[0].store.resident.lengths[0] + 1

    def _random(self, heads: int, count: int) -> Tensor:
        return torch.randn(1, heads, count, self.dim, generator=self._generator, device="cuda", dtype=torch.bfloat16)

    def _add_layer(self) -> None:
        keys, values = self._random(self.heads, self.tokens), self._random(self.heads, self.tokens)
        shape = LayerShape(
            1, self.query_heads, self.heads, self.dim, torch.bfloat16, keys.device, even_statistics(self.heads, self.dim)
        )
        state, index_of = LayerState(_BEHIND_DENSE, shape, self.method), self.method.index_config()
        index, sizes = state.index, self.method.zone_sizes()
        assert index is not None and index_of is not None
        state.store.host[0].reserve(self.tokens + _ROOM)
        moved = state.store.append_chunk(0, keys[0], values[0])
        assert moved is not None
        index.bind([DeviceRows(moved)])
        index.append(0, moved[:, :, 0])
        index.end_of_prompt(0, self._observed(keys) if isinstance(index_of, CentroidConfig) else None, sizes.sink_tokens)
        static = self.method.static_config()
        if isinstance(static, ObservationWindow):
            of_static, zone = static.tokens(state.top_k, 0.0), moved.shape[1]
            drawn = torch.rand(self.heads, zone, generator=self._generator, device="cuda").argsort(1)[:, :of_static]
            ids = drawn.sort(1).values.to(torch.int32)
            index.exclude(0, ids)
            state.static[0] = StaticSet(ids, state.store.host[0].gather(ids.cpu()).cuda())
        index.bind(state.store.host)
        self.keys.append(keys)
        self.values.append(values)
        self.states.append(state)

    def _observed(self, keys: Tensor) -> ObservedQueries:
        """The prompt's last queries: a chain that ends at the first decode step's."""
        config = self.method.index_config()
        assert isinstance(config, CentroidConfig)
        count = config.centroids(self.tokens)
        chain = [self.new[0]]
        for _ in range(count - 1):
            chain.append(COSINE * chain[-1] + (1 - COSINE**2) ** 0.5 * self._random(self.query_heads, 1))
        queries = torch.cat(chain[::-1], 2)[0]
        group, wide, lse = self.query_heads // self.heads, keys[0].float(), []
        for some in queries.float().unflatten(0, (self.heads, group)).split(8, 2):
            logits = some.flatten(1, 2) @ wide.transpose(1, 2) * self.params.scaling  # [H_kv, G * W, n]
            lse.append(logits.logsumexp(-1).unflatten(1, (group, -1)))
        return ObservedQueries(queries, torch.cat(lse, 2).flatten(0, 1), self.tokens - count)

    def turn(self, steps: int = 1) -> None:
        """Moves the queries on by some steps, of which only the last is made."""
        for _ in range(steps):
            turn(self.new[0])
        self._now += 1

    def full(self) -> None:
        """Full attention of every layer."""
        for keys, values in zip(self.keys, self.values, strict=True):
            F.scaled_dot_product_attention(self.new[0], keys, values, enable_gqa=True)

    def step(self, searching: bool) -> None:
        """One decode step of every layer, by the kernels."""
        queries, keys, values = self.new
        for layer in self.layers:
            layer.decode(queries, keys, values, self.params.scaling, searching)

    def captured(self, searching: bool) -> tuple[float, float, float]:
        """(p20, p50, p80) microseconds per layer, checked first."""
        if not self._checked:
            queries, keys, values = self.new
            self.layers[-1].check(queries, keys, values, self.params.scaling)
            self._checked = True
        self.step(True)  # rows for the steps that hold them
        between = self._between if searching else 1
        return timed(lambda: self.step(searching), len(self.layers), between=lambda: self.turn(between))

    def read(self) -> float:
        """Rows that a layer reads from the host in a captured step that searches: one more is made for it, behind one with the
        queries of the search before."""
        self.step(True)
        self.turn(self._between)
        before = self._read()
        self.step(True)
        return (self._read() - before) / len(self.layers)

    def _read(self) -> int:
        return sum(int(layer.layer.attention.read.sum()) for layer in self.layers)

    def moved(self, searches: float, rows: float) -> Moved:
        """Bytes of a step of one layer, of which `searches` search: representatives and scores of all units, attended rows.
        rows: read from the host; those selected that are not lie on the device already."""
        index, static = self.states[0].index, self.states[0].static[0]
        if not isinstance(index, UnitIndex):
            return NOT_COUNTED
        heads, chosen = Heads(self.query_heads, self.heads, self.dim), 0 if static is None else static.ids.shape[1]
        selected = heads.cache_bytes(self.states[0].top_k - chosen)
        scored = index.units(0).reps.nbytes + 4 * self.units * self.query_heads
        device = searches * scored + heads.cache_bytes(self.resident + chosen)
        return Moved(device, selected).reading(rows * heads.row_bytes)

    def check_uncaptured(self) -> None:
        """Raises CheckError unless one step selects what the search by torch operations does, but for a tenth whose scores may
        differ by rounding, and is fp32 attention to that selection, the static tokens and the resident ones."""
        state, static = self.states[0], self.states[0].static[0]
        state.held.pop(0, None)
        budget = Budget(state.top_k - (0 if static is None else static.ids.shape[1]), self.params.scaling)
        expected = self._reference_ids(state, budget)
        queries, keys, values = self.new
        out, group = decode_step(state, queries, keys, values, None, self.params), self.query_heads // self.heads
        held = state.held[0]
        for h in range(self.heads):
            ids, wanted = held.ids[h].long().cpu(), expected[h].tolist()
            require(len(set(ids.tolist()) & set(wanted)) >= 0.9 * len(ids), f"head {h}: other ids than the reference")
            parts = [state.store.host[0].take(torch.full_like(ids, h), ids).cuda(), state.store.resident.view(0)[h]]
            kv = torch.cat(parts if static is None else [*parts, static.rows[h]])[None, None]
            rows = Rows(kv, torch.tensor([[kv.shape[2]]], dtype=torch.int32, device="cuda"))
            of = slice(h * group, (h + 1) * group)
            right = attend_rows(queries[:, of], rows, self.params.scaling).out
            error = float((out[:, of].float() - right).norm() / right.norm())
            require(error < 1e-2, f"head {h}: relative error {error}")

    def _reference_ids(self, state: LayerState, budget: Budget) -> Tensor:
        """Ids `[H_kv, K]` without the kernels, or with CTkvr's rerank by torch operations on the device."""
        index, queries = state.index, self.new[0][:, :, 0]
        if isinstance(index, CentroidIndex):
            config = index._config
            index._config = replace(config, rerank="device")
            found = index.search(queries, budget, [0])
            index._config = config
        else:
            assert isinstance(index, UnitIndex)
            index._kernels = False
            found = index.search(queries, budget, [0])
            index._kernels = kernels_available(queries.device)
        return found.ids[0]

    def uncaptured(self, searching: bool) -> tuple[float, float, float, float, float]:
        """(p20, p50, p80) microseconds of one layer's step through the pipeline, checked first; and microseconds of its search,
        attention and learning, and rows that it reads from the host, as an extra pass with its stages timed measures them."""
        for layer in self.layers:
            layer.finish()
        self.check_uncaptured()
        state, times, before, read = self.states[0], [], {}, 0
        queries, keys, values = self.new
        for number in range(2 * _STEPS + 10):
            if number == _STEPS + 10:
                state.counters.timed, before = True, dict(state.stats.stage_seconds)
                read = state.stats.bytes_fetched
            self.turn()
            if searching:
                state.held.pop(0, None)
            torch.cuda.synchronize()
            start = time.perf_counter()
            decode_step(state, queries, keys, values, None, self.params)
            torch.cuda.synchronize()
            if 10 <= number < _STEPS + 10:
                times.append((time.perf_counter() - start) * 1e6)
        state.counters.timed = False
        spent = {stage: seconds - before.get(stage, 0.0) for stage, seconds in state.stats.stage_seconds.items()}
        host = sum(spent.get(stage, 0.0) for stage in ("search", "attend", "learn")) / _STEPS * 1e6
        row_bytes = Heads(self.query_heads, self.heads, self.dim).row_bytes
        rows = (state.stats.bytes_fetched - read) / row_bytes / _STEPS
        times.sort()
        return times[_STEPS // 5], times[_STEPS // 2], times[4 * _STEPS // 5], host, rows


@lru_cache(maxsize=1)
def _layers(shape: str, tokens: int, name: str) -> Layers:
    return Layers(shape, tokens, name)


@lru_cache(maxsize=8)
def _full(shape: str, tokens: int, name: str) -> tuple[Times, str]:
    return full_attention(cast(Any, _layers(shape, tokens, name)))


def measure(shape: str, tokens: int, system: str) -> Row:
    """Builds, checks and times one system."""
    name, captured = system.split("-")[0], not system.endswith("uncaptured") and system != "ctkvr"
    layers, host = _layers(shape, tokens, name), 0.0
    searches = 0.0 if "held" in system else 1 / _STRIDE if "every" in system else 1.0
    if not captured:
        *found, host, rows = layers.uncaptured("held" not in system)
    elif "every" in system:
        pairs = zip(layers.captured(True), layers.captured(False), strict=True)
        found = [(search + (_STRIDE - 1) * held) / _STRIDE for search, held in pairs]
    else:
        found = layers.captured("held" not in system)
    if captured:
        rows = searches * layers.read()
    p20, p50, p80 = found
    full, backend = _full(shape, tokens, name)
    moved = layers.moved(searches, rows)
    full_bytes, band = Heads(*SHAPES[shape]).cache_bytes(tokens), bandwidths()
    state, static = layers.states[0], layers.states[0].static[0]
    fetched = state.top_k - (0 if static is None else static.ids.shape[1])
    with numba_threads():
        threads = get_num_threads()
    row = Row(
        shape, tokens, system, captured, len(layers.layers) if captured else 1, p20, p50, p80, *full,
        backend, full[1] / p50,
        attended_tokens=layers.resident + state.top_k, fetched_rows=0 if "held" in system else fetched, units=layers.units,
        host_threads=threads if name == "ctkvr" else 0, host_us=host if name == "ctkvr" else 0.0,
        device_bytes=moved.device, bus_bytes=moved.bus, roofline_us=band.roofline_us(moved.device, moved.bus),
        full_bytes=full_bytes, full_roofline_us=band.roofline_us(full_bytes),
    )  # fmt: skip
    if not captured:
        _layers.cache_clear()  # their windows have moved on, and graphs would search units of before
    return row
